// Attention. Queries, keys and values are whole numbers, each head of a token with its own range, and so are the attention
// weights of a token, with a range that depends only on what the token sees. They are added up exactly, in any order, and
// what a token does not see adds nothing: so its result has the same bits whatever other tokens are in the pass.
#pragma once

#include <cstring>
#include <functional>
#include <limits>

#include "passes.h"
#include "product.h"
#include "vectors.h"

namespace passes {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int HEAD_MAX = 512;
constexpr int KEYS_AHEAD = 8;  // keys that are prefetched while one is laid out
constexpr float SHARE_STEPS = 1 << 30;  // steps of a weight between 0 and 1, for adding weights up exactly
constexpr float VALUE_MAX = 1023.0f;
constexpr float SEEN_MAX = 32767.0f;  // largest weight
constexpr float ALL_SEEN_MAX = 2.0e6f;  // sum of a token's weights: times VALUE_MAX, with 2^17 roundings up, it is below 2^31

inline int up(int number, int to) { return (number + to - 1) / to * to; }

// The largest whole number in heads of this size, so that no score exceeds 31 bits.
inline float whole_max(int head) { return std::floor(std::sqrt(2147483647.0f / static_cast<float>(head + 1))); }

// The largest absolute value in a head; NaN where the head holds NaN or infinity.
inline float head_size(const float* from, int head) {
    Floats most{}, wrong{};
    for (int d = 0; d < head; d += LANES) {
        const Floats each = load(from + d);
        most = larger(most, size_of(each));
        wrong += each * Floats{};
    }
    return sum(wrong) == 0 ? largest(most) : NAN;
}

// Round the `head` numbers of a head to whole numbers from -most to most; return their scale, or NaN as `head_size` does.
inline float round_head(const float* from, int head, float most, int16_t* to) {
    const float size = head_size(from, head), by = size > 0 ? most / size : 0.0f;
    for (int d = 0; d < head; d += LANES) store_halves(to + d, rounded(load(from + d) * same(by)));
    return size / most;
}

// The number of query heads and of key heads, and the numbers in each.
struct Heads {
    int count, keys, size;
    int cell() const { return keys * size; }
    int kept() const { return cell() + 2 * keys; }
    int sharing() const { return count / keys; }
};

// Keys, or values, of all heads. A token's cell is `kept` numbers of 16 bits: its heads, rounded, then their scales of 32 bits
// each. `held`: cells of the tokens before the tree; `own`: cells of the pass's tokens, rounded from `fresh` [tokens, cell].
struct Plane {
    const int16_t* held;
    int16_t* own;
    const float* fresh;
};

// Return the cell of a place, or nullptr beyond the tree; a head of the tree's own tokens is rounded now.
inline const int16_t* kept_at(const Tree& tree, const Heads& heads, int head, const Plane& of, float most, int key) {
    const int at = key - tree.held;
    const size_t wide = heads.kept();
    if (at >= tree.count) return nullptr;
    if (at < 0) {
        const int16_t* found = of.held + key * wide;
        for (int d = 0; d < heads.size; d += LINE_BYTES / sizeof(int16_t)) __builtin_prefetch(found + KEYS_AHEAD * wide + head * heads.size + d);
        return found;
    }
    const size_t token = tree.first + at;
    int16_t* cell = of.own + token * wide;
    const float scale = round_head(of.fresh + token * heads.cell() + head * heads.size, heads.size, most, cell + head * heads.size);
    std::memcpy(cell + heads.cell() + 2 * head, &scale, sizeof scale);
    return cell;
}

inline float scale_in(const int16_t* cell, const Heads& heads, int head) {
    float scale;
    std::memcpy(&scale, cell + heads.cell() + 2 * head, sizeof scale);
    return scale;
}

// Lay out the keys of one head, WIDE side by side: [., head / 2, WIDE], two numbers in each entry.
inline void lay_keys(const Tree& tree, const Heads& heads, int head, const Plane& of, int begin, int end, int32_t* to, float* scales) {
    static const int16_t nothing[HEAD_MAX] = {};
    for (int first = begin; first < end; first += LANES) {
        const int16_t* from[LANES];
        for (int n = 0; n < LANES; ++n) {
            const int16_t* cell = kept_at(tree, heads, head, of, whole_max(heads.size), first + n);
            from[n] = cell ? cell + head * heads.size : nothing;
            scales[first + n] = cell ? scale_in(cell, heads, head) : 0;
        }
        int32_t* block = to + static_cast<size_t>(first / WIDE) * (heads.size / 2) * WIDE + first % WIDE;
        for (int d = 0; d < heads.size / 2; d += LANES) {
            Ints pairs[LANES];
            for (int n = 0; n < LANES; ++n) pairs[n] = load(reinterpret_cast<const int32_t*>(from[n] + 2 * d));
            transpose(pairs);
            for (int n = 0; n < LANES; ++n) store(block + (d + n) * WIDE, pairs[n]);
        }
    }
}

// Lay out the values of one head for products with weights: [head / WIDE, places / 2, WIDE], two places in each entry.
inline void lay_values(const Tree& tree, const Heads& heads, int head, const Plane& of, int begin, int end, int32_t* to, float* scales) {
    static const int16_t nothing[HEAD_MAX] = {};
    const size_t panel = static_cast<size_t>(up(tree.held + tree.count, WIDE)) / 2 * WIDE;
    for (int key = begin; key < end; key += 2) {
        const int16_t* pair[2];
        for (int n = 0; n < 2; ++n) {
            const int16_t* cell = kept_at(tree, heads, head, of, VALUE_MAX, key + n);
            pair[n] = cell ? cell + head * heads.size : nothing;
            scales[key + n] = cell ? scale_in(cell, heads, head) : 0;
        }
        for (int d = 0; d < heads.size; d += LANES)
            store(to + d / WIDE * panel + static_cast<size_t>(key / 2) * WIDE + d % WIDE,
                  (halves(pair[0] + d) & same(0xffff)) | halves(pair[1] + d) << 16);
    }
}

template <int ROWS>
inline void scores_of(const int32_t* queries, const float* query_scales, const int32_t* keys, const float* key_scales, int head, float* to,
                      size_t stride) {
    alignas(64) int32_t sums[ROWS * WIDE];
    tile<ROWS, Precision::HALVES, true>(queries, head / 2, nullptr, 0, reinterpret_cast<const int8_t*>(keys), head / 2, sums, true);
    for (int r = 0; r < ROWS; ++r)
        for (int at = 0; at < WIDE; at += LANES)
            store(to + r * stride + at, as_floats(load(sums + r * WIDE + at)) * (same(query_scales[r]) * load(key_scales + at)));
}

// Turn scores into weights (softmax), multiply these by the scales of the values, and round them to whole numbers. Return the
// factor for the sums of the weighted values; NaN where a score or a scale is not finite.
inline float weigh(float* scores, const float* scales, int held, int keys, int room, const uint8_t* sees, int16_t* to) {
    for (int key = held; key < keys; ++key) scores[key] = sees[key - held] ? scores[key] : NOTHING;
    for (int key = keys; key < room; ++key) scores[key] = NOTHING;
    Floats most = same(NOTHING), wrong{};
    for (int key = 0; key < room; key += LANES) {
        const Floats each = load(scores + key);
        wrong += each == each ? Floats{} : same(1.0f);
        most = larger(most, each);
    }
    const float top = largest(most);
    if (sum(wrong) != 0 || !std::isfinite(top)) return NAN;
    Longs low{}, high{};
    Floats widest{};
    most = Floats{};
    for (int key = 0; key < room; key += LANES) {
        const Floats score = load(scores + key), share = exponential(score - same(top));
        const Ints whole = rounded(share * same(SHARE_STEPS));
        low += (Longs)whole & int64_t{0xffffffff}, high += (Longs)whole >> 32;
        const Floats scale = score > same(NOTHING) ? load(scales + key) : Floats{}, each = share * scale;
        store(scores + key, each);
        wrong += each * Floats{}, most = larger(most, each), widest = larger(widest, scale);
    }
    if (sum(wrong) != 0) return NAN;
    int64_t total = 0;
    for (int n = 0; n < LANES / 2; ++n) total += low[n] + high[n];
    const float all = static_cast<float>(static_cast<double>(total) / SHARE_STEPS), largest_of_all = largest(most);
    if (largest_of_all == 0) return std::fill_n(to, room, 0), 0.0f;
    const float by = std::fmin(SEEN_MAX / largest_of_all, ALL_SEEN_MAX / (all * largest(widest)));
    for (int key = 0; key < room; key += LANES) store_halves(to + key, rounded(load(scores + key) * same(by)));
    return 1.0f / (by * all);
}

// Keys and values of one head, laid out, and their scales.
struct Laid {
    const int32_t *keys, *values;
    const float *key_scales, *value_scales;
};

// Memory for ROWS_MAX times all places; `weights` hold two in each entry.
struct Scores {
    Buffer<float> scores;
    Buffer<int32_t> weights;
};

template <int ROWS>
inline void attend_rows(const Tree& tree, const Heads& heads, const float* const* queries, const int* tokens, const Laid& laid, int seen,
                        float* const* to, const Scores& in) {
    const int all = tree.held + seen, room = up(all, WIDE);
    const size_t panel = static_cast<size_t>(up(tree.held + tree.count, WIDE)) / 2 * WIDE;
    float* scores = in.scores.get();
    int32_t* weights = in.weights.get();
    alignas(64) int32_t whole[ROWS * HEAD_MAX / 2];
    float scales[ROWS];
    for (int r = 0; r < ROWS; ++r)
        scales[r] = round_head(queries[r], heads.size, whole_max(heads.size), reinterpret_cast<int16_t*>(whole + r * heads.size / 2));
    for (int key = 0; key < room; key += WIDE)
        scores_of<ROWS>(whole, scales, laid.keys + static_cast<size_t>(key) * (heads.size / 2), laid.key_scales + key, heads.size, scores + key,
                        room);
    for (int r = 0; r < ROWS; ++r) {
        const uint8_t* sees = tree.sees + static_cast<size_t>(tokens[r]) * tree.count;
        auto* weighed = reinterpret_cast<int16_t*>(weights + static_cast<size_t>(r) * (room / 2));
        scales[r] = weigh(scores + static_cast<size_t>(r) * room, laid.value_scales, tree.held, all, room, sees, weighed);
    }
    for (int d = 0; d < heads.size; d += WIDE) {
        alignas(64) int32_t sums[ROWS * WIDE];
        const auto* values = reinterpret_cast<const int8_t*>(laid.values + d / WIDE * panel);
        tile<ROWS, Precision::HALVES, true>(weights, room / 2, nullptr, 0, values, room / 2, sums, true);
        for (int r = 0; r < ROWS; ++r)
            for (int at = 0; at < WIDE; at += LANES) store(to[r] + d + at, as_floats(load(sums + r * WIDE + at)) * same(scales[r]));
    }
}

template <int ROWS = ROWS_MAX, class... Rest>
inline void attend_some(int rows, Rest... rest) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return attend_some<ROWS - 1>(rows, rest...);
    }
    attend_rows<ROWS>(rest...);
}

// Attend, for tokens `begin` to `end` of a tree, to one head of keys. `queries` and `to`: [tokens of the pass, heads, size].
inline void attend(const Tree& tree, const Heads& heads, int head, int begin, int end, const float* queries, const Laid& laid, float* to,
                   const Scores& in) {
    const int sharing = heads.sharing(), width = heads.count * heads.size;
    int seen = 0;  // how far into the tree these tokens see
    for (int token = begin; token < end; ++token)
        for (int other = tree.count - 1; other >= seen; --other)
            if (tree.sees[static_cast<size_t>(token) * tree.count + other]) {
                seen = other + 1;
                break;
            }
    const int first = begin * sharing, last = end * sharing;
    for (int row = first; row < last; row += ROWS_MAX) {
        const float* from[ROWS_MAX];
        float* into[ROWS_MAX];
        int tokens[ROWS_MAX];
        const int rows = last - row < ROWS_MAX ? last - row : ROWS_MAX;
        for (int r = 0; r < rows; ++r) {
            tokens[r] = (row + r) / sharing;
            const size_t at = static_cast<size_t>(tree.first + tokens[r]) * width + (head * sharing + (row + r) % sharing) * heads.size;
            from[r] = queries + at;
            into[r] = to + at;
        }
        attend_some(rows, std::cref(tree), std::cref(heads), from, tokens, std::cref(laid), seen, into, std::cref(in));
    }
}

}  // namespace passes
