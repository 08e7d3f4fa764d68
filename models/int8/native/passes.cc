// A model of the architecture `llama`: a pass of tokens through its layers, each step done by all threads of a team.
#include "passes.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <numeric>
#include <vector>

#include "attention.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#ifndef PASSES_SOURCES
#define PASSES_SOURCES ""
#endif

using namespace passes;

namespace {

constexpr int TOKENS_TOGETHER = 16;  // tokens of a tree in one piece of its attention
constexpr int KEYS_TOGETHER = 64;
constexpr int PIECES_MIN = 4;  // (tree, head) pairs for each thread, if each pair is done by one thread

// Return the place of a column of two matrices that are used in pairs: LANES columns of one, then LANES of the other.
int paired(int column, int second) { return column / LANES * WIDE + second * LANES + column % LANES; }

struct Layer {
    std::vector<float> norm, inner_norm;
    Matrix turning, values, output, inner, down;  // turning: queries and keys; inner: gate and up
};

// RMS norm: divide numbers by the root of their mean square, and multiply by `scales`.
void normalise(const float* from, const float* scales, int width, float epsilon, float* to) {
    Floats squares{};
    int k = 0;
    for (; k + LANES <= width; k += LANES) squares = product_and_sum(load(from + k), load(from + k), squares);
    float total = sum(squares);
    for (; k < width; ++k) total += from[k] * from[k];
    const float by = std::isfinite(total) ? 1.0f / std::sqrt(total / static_cast<float>(width) + epsilon) : NAN;
    for (k = 0; k + LANES <= width; k += LANES) store(to + k, load(from + k) * same(by) * load(scales + k));
    for (; k < width; ++k) to[k] = from[k] * by * scales[k];
}

// Store the numbers of `value` from index `at` on, but none at or beyond `count`.
void put(float* to, int at, int count, Floats value) {
    if (at + LANES <= count) return store(to + at, value);
    for (int n = 0; at + n < count; ++n) to[at + n] = value[n];
}

// Multiply each block by a Hadamard matrix divided by the root of its size. `states` has memory for LANES more numbers.
void turn_blocks(float* states, int count, int block) {
    const Floats by = same(1.0f / std::sqrt(static_cast<float>(block)));
    for (int at = 0; at < count; at += LANES) {
        Floats each = load(states + at) * by;
#pragma GCC unroll 4
        for (int bit = 0; bit < LANES_BITS; ++bit) {
            if (1 << bit >= block) break;
            const Ints upper = numbered() << (31 - bit) & same(SIGN);
            each = exchanged(each, numbered() ^ same(1 << bit)) + (Floats)((Ints)each ^ upper);
        }
        put(states, at, count, each);
    }
    int half = LANES;
    for (; 4 * half <= block; half *= 4)  // two steps at once
        for (int start = 0; start < count; start += 4 * half)
            for (float* at = states + start; at < states + start + half; at += LANES) {
                const Floats a = load(at), b = load(at + half), c = load(at + 2 * half), d = load(at + 3 * half);
                const Floats low = a + b, high = a - b, next_low = c + d, next_high = c - d;
                store(at, low + next_low), store(at + half, high + next_high);
                store(at + 2 * half, low - next_low), store(at + 3 * half, high - next_high);
            }
    for (; half < block; half *= 2)
        for (int start = 0; start < count; start += 2 * half)
            for (float* at = states + start; at < states + start + half; at += LANES) {
                const Floats low = load(at), high = load(at + half);
                store(at, low + high), store(at + half, low - high);
            }
}

void add(float* to, int at, int count, Floats value) {
    if (at + LANES <= count) return store(to + at, load(to + at) + value);
    for (int n = 0; at + n < count; ++n) to[at + n] += value[n];
}

std::vector<int> in_order(int count) {
    std::vector<int> found(count);
    std::iota(found.begin(), found.end(), 0);
    return found;
}

std::vector<float> copied(const float* from, size_t count) { return {from, from + count}; }

std::vector<float> joined(const float* first, size_t count, const float* second, size_t more) {
    std::vector<float> found(first, first + count);
    found.insert(found.end(), second, second + more);
    return found;
}

}  // namespace

struct Model {
    explicit Model(const Sizes& of) : sizes(of), heads{of.heads, of.key_heads, of.head}, layers(of.layers) {}
    // The last layer is rounded less, so that NaN shows.
    Precision precision(int layer) const { return sizes.bytes && layer + 1 < sizes.layers ? Precision::BYTES : Precision::HALVES; }

    const Sizes sizes;
    const Heads heads;
    std::vector<Layer> layers;
    std::vector<float> embedding, norm, cosines, sines;
    Matrix head;
};

struct Engine {
    Engine(const Model& of, int threads) : model(of), team(threads), scores(threads) {}

    void need(const Pass& pass) {
        const Sizes& sizes = model.sizes;
        const size_t tokens = pass.tokens, spare = LANES;
        states.need(tokens * sizes.width + spare);
        answered.need(static_cast<size_t>(pass.answering) * sizes.width + spare);
        queries.need(tokens * sizes.heads * sizes.head + spare);
        attended.need(tokens * sizes.heads * sizes.head + spare);
        for (auto* each : {&keys, &values}) each->need(tokens * model.heads.cell() + spare);
        inner.need(tokens * sizes.inner + spare);
        rounded.need(pass.tokens, std::max({sizes.width, sizes.inner, sizes.heads * sizes.head}));
        normed.resize(team.threads());
        for (auto& each : normed) each.need(std::max({sizes.width, sizes.inner, sizes.heads * sizes.head}) + spare);
        apart = pass.tree_count * sizes.key_heads >= PIECES_MIN * team.threads();
        lay_out(pass);
        const size_t places = apart ? most * team.threads() : laid.back() * sizes.key_heads;
        for (auto* each : {&keys_laid, &values_laid}) each->need(places * sizes.head / 2);
        for (auto* each : {&key_scales, &value_scales}) each->need(places);
        for (auto& each : scores) each.scores.need(most * ROWS_MAX), each.weights.need(most * ROWS_MAX / 2);
    }

    void run(const Pass& pass, int rank) {
        const Sizes& sizes = model.sizes;
        const int width = sizes.width;
        in_blocks(team, pass.tokens, [&](const Rows& rows) {
            team.each(rows, [&](int row) {
                std::copy_n(model.embedding.data() + static_cast<size_t>(pass.ids[row]) * width, width, states.get() + static_cast<size_t>(row) * width);
            });
            if (pass.layers > 0) turn(pass, 0, rows, rank);
        });
        for (int n = 0; n < pass.layers; ++n) {
            attend_all(pass, n, rank);
            const bool last = n + 1 == pass.layers;  // continues with the wanted tokens alone
            in_blocks(team, last ? pass.answering : pass.tokens, [&](const Rows& rows) {
                go_on(pass, n, rows, rank);
                if (!last) turn(pass, n + 1, rows, rank);
            });
        }
        const bool all = pass.layers == 0;  // without layers, the states are still of all tokens, not only the wanted ones
        in_blocks(team, pass.answering, [&](const Rows& rows) {
            if (pass.states)
                return team.each(rows, [&](int row) {
                    const float* from = all ? states.get() + pass.wanted[row] * width : answered.get() + static_cast<size_t>(row) * width;
                    std::copy_n(from, width, pass.answers + static_cast<size_t>(row) * width);
                });
            read(rows, answered.get(), model.norm.data(), model.head, rank);
            multiply(team, model.head, rounded, rows, [&](int row, int panel, Floats low, Floats high) {
                put(pass.answers + static_cast<size_t>(row) * sizes.words, panel * WIDE, sizes.words, low);
                put(pass.answers + static_cast<size_t>(row) * sizes.words, panel * WIDE + LANES, sizes.words, high);
            });
        });
    }

    const Model& model;
    Team team;

   private:
    struct Piece {
        int tree, head, begin, end;
    };

    static int room_of(const Tree& tree) { return up(tree.held + tree.count, WIDE); }

    void lay_out(const Pass& pass) {
        laid.assign(1, 0), most = 0;
        lay_pieces.clear(), attend_pieces.clear();
        for (int tree = 0; tree < pass.tree_count; ++tree) {
            const int room = room_of(pass.trees[tree]), count = pass.trees[tree].count;
            laid.push_back(laid.back() + room);
            most = std::max<size_t>(most, room);
            for (int head = 0; !apart && head < model.sizes.key_heads; ++head) {
                for (int at = 0; at < room; at += KEYS_TOGETHER) lay_pieces.push_back({tree, head, at, std::min(at + KEYS_TOGETHER, room)});
                for (int at = 0; at < count; at += TOKENS_TOGETHER) attend_pieces.push_back({tree, head, at, std::min(at + TOKENS_TOGETHER, count)});
            }
        }
    }

    // Normalise rows and round them for a product.
    void read(const Rows& rows, const float* from, const float* scales, const Matrix& of, int rank) {
        team.each(rows, [&](int row) {
            float* to = normed[rank].get();
            normalise(from + static_cast<size_t>(row) * of.depth, scales, of.depth, model.sizes.epsilon, to);
            rounded.put(row, to, of);
        });
    }

    // Compute the queries and keys of rows, with their rotary embedding, and the values.
    void turn(const Pass& pass, int n, const Rows& rows, int rank) {
        const Layer& layer = model.layers[n];
        const Heads& heads = model.heads;
        const int wide = heads.count * heads.size, cell = heads.cell(), half = heads.size / 2;
        read(rows, states.get(), layer.norm.data(), layer.turning, rank);
        multiply(team, layer.turning, rounded, rows, [&](int row, int panel, Floats low, Floats high) {
            const int column = panel * LANES, head = column / half, at = column % half;  // `low` is of a head's lower half
            const size_t turn = static_cast<size_t>(pass.positions[row]) * half + at;
            const Floats cosine = load(model.cosines.data() + turn), sine = load(model.sines.data() + turn);
            float* to = head < heads.count ? queries.get() + static_cast<size_t>(row) * wide + head * heads.size
                                           : keys.get() + static_cast<size_t>(row) * cell + (head - heads.count) * heads.size;
            store(to + at, product_and_sum(low, cosine, -(high * sine)));
            store(to + at + half, product_and_sum(high, cosine, low * sine));
        });
        multiply(team, layer.values, rounded, rows, [&](int row, int panel, Floats low, Floats high) {
            float* to = values.get() + static_cast<size_t>(row) * cell;
            put(to, panel * WIDE, cell, low);
            put(to, panel * WIDE + LANES, cell, high);
        });
    }

    void attend_all(const Pass& pass, int n, int rank) {
        if (apart) {
            team.each(pass.tree_count * model.heads.keys, [&](int piece) {
                const int tree = piece / model.heads.keys, head = piece % model.heads.keys, count = pass.trees[tree].count;
                lay(pass, n, {tree, head, 0, room_of(pass.trees[tree])}, rank * most);
                for (int at = 0; at < count; at += TOKENS_TOGETHER)
                    look(pass, {tree, head, at, std::min(at + TOKENS_TOGETHER, count)}, rank * most, rank);
            });
            return;
        }
        const auto place = [&](const Piece& of) { return laid[of.tree] * model.heads.keys + room_of(pass.trees[of.tree]) * of.head; };
        team.each(static_cast<int>(lay_pieces.size()), [&](int piece) { lay(pass, n, lay_pieces[piece], place(lay_pieces[piece])); });
        team.each(static_cast<int>(attend_pieces.size()), [&](int piece) { look(pass, attend_pieces[piece], place(attend_pieces[piece]), rank); });
    }

    void lay(const Pass& pass, int n, const Piece& piece, size_t place) {
        const auto& [at, head, begin, end] = piece;
        const Heads& heads = model.heads;
        const Tree& tree = pass.trees[at];
        const size_t kept = static_cast<size_t>(pass.tokens) * heads.kept(), start = place * heads.size / 2;
        const int16_t* held = tree.cells + tree.plane * 2 * n;
        int16_t* own = pass.cells + kept * 2 * n;
        lay_keys(tree, heads, head, {held, own, keys.get()}, begin, end, keys_laid.get() + start, key_scales.get() + place);
        lay_values(tree, heads, head, {held + tree.plane, own + kept, values.get()}, begin, end, values_laid.get() + start,
                   value_scales.get() + place);
    }

    void look(const Pass& pass, const Piece& piece, size_t place, int rank) {
        const auto& [at, head, begin, end] = piece;
        const size_t start = place * model.heads.size / 2;
        const Laid of{keys_laid.get() + start, values_laid.get() + start, key_scales.get() + place, value_scales.get() + place};
        attend(pass.trees[at], model.heads, head, begin, end, queries.get(), of, attended.get(), scores[rank]);
    }

    // Compute the rest of the layer for rows: output of the attention, norm, gate and down.
    void go_on(const Pass& pass, int n, const Rows& rows, int rank) {
        const Sizes& sizes = model.sizes;
        const Layer& layer = model.layers[n];
        const int width = sizes.width, wide = sizes.heads * sizes.head;
        const bool last = n + 1 == pass.layers;
        float* on = last ? answered.get() : states.get();
        team.each(rows, [&](int row) {
            const int64_t from = last ? pass.wanted[row] : row;
            if (last) std::copy_n(states.get() + from * width, width, on + static_cast<size_t>(row) * width);
            rounded.put(row, attended.get() + from * wide, layer.output);
        });
        const auto added = [&](int row, int panel, Floats low, Floats high) {
            add(on + static_cast<size_t>(row) * width, panel * WIDE, width, low);
            add(on + static_cast<size_t>(row) * width, panel * WIDE + LANES, width, high);
        };
        multiply(team, layer.output, rounded, rows, added);
        read(rows, on, layer.inner_norm.data(), layer.inner, rank);
        multiply(team, layer.inner, rounded, rows, [&](int row, int panel, Floats gate, Floats up) {
            const Floats small = exponential((Floats)((Ints)gate | same(SIGN)));  // e^-|gate|
            const Ints negative = gate < Floats{};
            const Floats share = (negative ? small : same(1.0f)) / (same(1.0f) + small);
            put(inner.get() + static_cast<size_t>(row) * sizes.inner, panel * LANES, sizes.inner, gate * share * up);
        });
        team.each(rows, [&](int row) {
            float* from = inner.get() + static_cast<size_t>(row) * sizes.inner;
            if (sizes.block && layer.down.precision == Precision::BYTES) turn_blocks(from, sizes.inner, sizes.block);
            rounded.put(row, from, layer.down);
        });
        multiply(team, layer.down, rounded, rows, added);
    }

    Buffer<float> states, answered, queries, keys, values, attended, inner, key_scales, value_scales;
    Buffer<int32_t> keys_laid, values_laid;
    Rounded rounded;
    std::vector<Buffer<float>> normed;
    std::vector<Scores> scores;
    bool apart = false;  // with many trees: one thread lays out and attends to a head of one tree, in memory of its own
    size_t most = 0;  // places of the largest tree
    std::vector<size_t> laid;  // for each tree, the places of one head that are laid out before its own
    std::vector<Piece> lay_pieces, attend_pieces;
};

namespace {

template <class Work>
int without_throwing(Work&& work) {
    try {
        work();
        return 0;
    } catch (const std::exception&) {  // no memory, or no thread
        return 1;
    }
}

}  // namespace

extern "C" {

const char* passes_sources() { return PASSES_SOURCES; }

int passes_model(const Sizes* sizes, Model** made) {
    return without_throwing([&] { *made = new Model(*sizes); });
}

void passes_model_free(Model* model) { delete model; }

int passes_layer(Model* model, int32_t n, const float* norm, const float* query, const float* key, const float* value,
                 const float* output, const float* inner_norm, const float* gate, const float* up, const float* down) {
    return without_throwing([&] {
        const Sizes& sizes = model->sizes;
        const Precision kind = model->precision(n);
        const size_t width = sizes.width, inner = sizes.inner;
        const int wide = sizes.heads * sizes.head, cell = model->heads.cell(), half = sizes.head / 2;
        Layer& layer = model->layers[n];
        layer.norm = copied(norm, width), layer.inner_norm = copied(inner_norm, width);
        std::vector<int> place(wide + cell);
        for (int column = 0; column < wide + cell; ++column) {
            const int at = column % sizes.head;
            place[column] = paired(column / sizes.head * half + at % half, at / half);
        }
        const auto turning = joined(query, wide * width, key, cell * width);
        layer.turning.pack(turning.data(), wide + cell, sizes.width, place, wide + cell, kind);
        layer.values.pack(value, cell, sizes.width, in_order(cell), cell, kind);
        layer.output.pack(output, sizes.width, wide, in_order(sizes.width), sizes.width, kind);
        std::vector<int> pairs(2 * inner);
        for (size_t column = 0; column < 2 * inner; ++column) pairs[column] = paired(static_cast<int>(column % inner), column >= inner);
        const auto both = joined(gate, inner * width, up, inner * width);
        layer.inner.pack(both.data(), 2 * sizes.inner, sizes.width, pairs, 2 * passes::up(sizes.inner, LANES), kind);
        layer.down.pack(down, sizes.width, sizes.inner, in_order(sizes.width), sizes.width, kind);
    });
}

int passes_ends(Model* model, const float* embedding, const float* norm, const float* head, const float* cosines, const float* sines) {
    return without_throwing([&] {
        const Sizes& sizes = model->sizes;
        model->embedding = copied(embedding, static_cast<size_t>(sizes.words) * sizes.width);
        model->norm = copied(norm, sizes.width);
        model->head.pack(head, sizes.words, sizes.width, in_order(sizes.words), sizes.words, Precision::HALVES);
        const size_t turns = static_cast<size_t>(sizes.context) * (sizes.head / 2);
        model->cosines = copied(cosines, turns), model->sines = copied(sines, turns);
    });
}

int passes_product(const float* states, const float* weights, int32_t rows, int32_t columns, int32_t depth, int32_t bytes,
                   int32_t threads, int32_t repeats, float* answers, double* seconds) {
    return without_throwing([&] {
        Matrix matrix;
        matrix.pack(weights, columns, depth, in_order(columns), columns, bytes ? Precision::BYTES : Precision::HALVES);
        Rounded rounded;
        rounded.need(rows, depth);
        std::vector<float> row(depth + LANES);
        for (int n = 0; n < rows; ++n) {
            std::copy_n(states + static_cast<size_t>(n) * depth, depth, row.begin());
            rounded.put(n, row.data(), matrix);
        }
        Team team(threads);
        *seconds = std::numeric_limits<double>::infinity();
        for (int n = 0; n < repeats; ++n) {
            const auto began = std::chrono::steady_clock::now();
            team.run([&](int) {
                multiply(team, matrix, rounded, Rows{0, rows, false}, [&](int at, int panel, Floats low, Floats high) {
                    put(answers + static_cast<size_t>(at) * columns, panel * WIDE, columns, low);
                    put(answers + static_cast<size_t>(at) * columns, panel * WIDE + LANES, columns, high);
                });
            });
            *seconds = std::min(*seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
        }
    });
}

int passes_engine(const Model* model, int32_t threads, Engine** made) {
    return without_throwing([&] { *made = new Engine(*model, threads); });
}

void passes_engine_free(Engine* engine) { delete engine; }

void passes_engine_wake(Engine* engine) { engine->team.wake(); }

int passes_run(Engine* engine, const Pass* pass) {
    return without_throwing([&] {
        engine->need(*pass);
        engine->team.run([&](int rank) { engine->run(*pass, rank); });
    });
}
}
