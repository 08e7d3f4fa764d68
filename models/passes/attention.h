// What each token attends to. Scores are of queries and keys in whole numbers of 16 bits, each with a range of its own, so they
// are exact. What a token sees is added up in 32 bits in the order of its places, and what it does not see adds exactly nothing:
// so its answer is the same bits whatever other tokens stand in the pass.
#pragma once

#include <limits>

#include "passes.h"
#include "product.h"
#include "vectors.h"

namespace passes {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int HEAD_MAX = 512;
constexpr float WEIGHT_STEPS = 1 << 30;  // a weight's share of the sum, in whole numbers: those add up in any order

inline int up(int number, int to) { return (number + to - 1) / to * to; }

// The largest whole number in heads of so many numbers: no score is more than 31 bits.
inline float whole_max(int head) { return std::floor(std::sqrt(2147483647.0f / static_cast<float>(head + 1))); }

// Round numbers of a head, `head` of them, to whole ones, two in each of `to`; return their scale, or no number.
inline float round_head(const float* from, int head, int32_t* to) {
    Floats most{}, wrong{};
    for (int d = 0; d < head; d += LANES) {
        const Floats each = load(from + d);
        most = larger(most, (Floats)((Ints)each & same(0x7fffffff)));
        wrong += each * Floats{};
    }
    const float size = largest(most), by = whole_max(head);
    for (int d = 0; d < head; d += LANES) store_halves(reinterpret_cast<int16_t*>(to) + d, rounded(load(from + d) * same(size > 0 ? by / size : 0.0f)));
    return sum(wrong) == 0 ? size / by : NAN;
}

// Lay the keys of one head side by side, WIDE at a time: [., head / 2, WIDE], of two numbers each. `from`: those before the
// tree, `own`: the tree's.
inline void lay_out(const Tree& tree, const float* from, const float* own, int cell, int head, int begin, int end, int32_t* to, float* scales) {
    int32_t whole[HEAD_MAX / 2];
    for (int key = begin; key < end; ++key) {
        int32_t* column = to + static_cast<size_t>(key / WIDE) * (head / 2) * WIDE + key % WIDE;
        const int at = key - tree.held;
        if (at >= tree.count) std::fill_n(whole, head / 2, 0), scales[key] = 0;
        else scales[key] = round_head(at < 0 ? from + static_cast<size_t>(key) * cell : own + static_cast<size_t>(tree.first + at) * cell, head, whole);
        for (int d = 0; d < head / 2; ++d) column[d * WIDE] = whole[d];
    }
}

template <int ROWS>
inline void scores_of(const int32_t* queries, const float* query_scales, const int32_t* keys, const float* key_scales, int head, float* to, size_t stride) {
    alignas(64) int32_t sums[ROWS * WIDE];
    tile<ROWS, Precision::HALVES, true>(queries, head / 2, nullptr, 0, reinterpret_cast<const int8_t*>(keys), head / 2, sums, true);
    for (int r = 0; r < ROWS; ++r)
        for (int at = 0; at < WIDE; at += LANES)
            store(to + r * stride + at, as_floats(load(sums + r * WIDE + at)) * (same(query_scales[r]) * load(key_scales + at)));
}

template <int ROWS>
inline void add_values(const float* weights, size_t stride, int keys, const float* values, int cell, Floats (&found)[ROWS][2]) {
    for (int key = 0; key < keys; ++key) {
        const float* from = values + static_cast<size_t>(key) * cell;
        const Floats low = load(from), high = load(from + LANES);
        for (int r = 0; r < ROWS; ++r) {
            const Floats weight = same(weights[r * stride + key]);
            found[r][0] = product_and_sum(weight, low, found[r][0]);
            found[r][1] = product_and_sum(weight, high, found[r][1]);
            in_turn(found[r][0], found[r][1]);
        }
    }
}

// Turn scores into weights, and return what they add up to, or no number.
inline float weigh(float* scores, int held, int keys, int room, const uint8_t* sees) {
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
    int64_t total = 0;
    for (int key = 0; key < room; key += LANES) {
        const Floats each = exponential(load(scores + key) - same(top));
        store(scores + key, each);
        total += whole_sum(rounded(each * same(WEIGHT_STEPS)));
    }
    return static_cast<float>(static_cast<double>(total) / WEIGHT_STEPS);
}

struct Heads {
    int count, keys, size;  // of queries, of keys; and of how many numbers
    int cell() const { return keys * size; }
    int sharing() const { return count / keys; }
};

template <int ROWS>
inline void attend_rows(const Tree& tree, const Heads& heads, const float* const* queries, const int* tokens, const int32_t* keys,
                        const float* key_scales, const float* held, const float* own, int seen, float* const* to, float* scores) {
    const int all = tree.held + seen, room = up(all, WIDE);
    alignas(64) int32_t whole[ROWS * HEAD_MAX / 2];
    float scales[ROWS];
    for (int r = 0; r < ROWS; ++r) scales[r] = round_head(queries[r], heads.size, whole + r * heads.size / 2);
    for (int key = 0; key < room; key += WIDE)
        scores_of<ROWS>(whole, scales, keys + static_cast<size_t>(key) * (heads.size / 2), key_scales + key, heads.size, scores + key, room);
    float totals[ROWS];
    for (int r = 0; r < ROWS; ++r)
        totals[r] = weigh(scores + static_cast<size_t>(r) * room, tree.held, all, room, tree.sees + static_cast<size_t>(tokens[r]) * tree.count);
    for (int d = 0; d < heads.size; d += WIDE) {
        Floats found[ROWS][2] = {};
        add_values<ROWS>(scores, room, tree.held, held + d, heads.cell(), found);
        add_values<ROWS>(scores + tree.held, room, seen, own + static_cast<size_t>(tree.first) * heads.cell() + d, heads.cell(), found);
        for (int r = 0; r < ROWS; ++r)
            for (int half = 0; half < 2; ++half) store(to[r] + d + half * LANES, found[r][half] / same(totals[r]));
    }
}

template <int ROWS = ROWS_MAX, class... Rest>
inline void attend_some(int rows, Rest... rest) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return attend_some<ROWS - 1>(rows, rest...);
    }
    attend_rows<ROWS>(rest...);
}

// Tokens `begin` to `end` of a tree, with one head of keys: queries and what is found [tokens of the pass, heads, size].
// `keys`, `key_scales`: as `lay_out` lays them; `held`, `own`: values of the head; `scores`: room for ROWS_MAX times all places.
inline void attend(const Tree& tree, const Heads& heads, int head, int begin, int end, const float* queries, const int32_t* keys,
                   const float* key_scales, const float* held, const float* own, float* to, float* scores) {
    const int sharing = heads.sharing(), width = heads.count * heads.size;
    int seen = 0;  // how far into the tree any of these sees
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
        attend_some(rows, tree, heads, from, tokens, keys, key_scales, held, own, seen, into, scores);
    }
}

}  // namespace passes
