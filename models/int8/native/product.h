// Products of rows of states with a matrix of weights, added up in whole numbers. They are exact, so a row's result has the same
// bits whatever other rows are multiplied with it, and in any order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace passes {

constexpr float WEIGHT_MAX = 127.0f;
constexpr int BLOCK_UNITS = 192;  // units of 32 bits for each column: such a block of weights stays in the L1 cache
constexpr int BLOCK_ROWS = 264;
constexpr int TILES_MIN = 4;  // tiles of rows for each thread, so that it gets rows of its own
constexpr size_t LINE_BYTES = 64;
constexpr float BYTE_MAX = 127.0f;
constexpr float PAIR_MAX = 128.0f;  // before rounding; after it 129, and 129 * 2 * WEIGHT_MAX is less than 2^15
constexpr float CHAIN_MAX = 32700.0f;  // leaves room for the rounding error of 32-bit floats in the compared value
constexpr float CHAIN_ROUNDING = 1.5f;  // rounding lengthens the vector of a chain's 8 states by at most half the root of 8

// What a state is rounded to: `HALVES`, 15 bits and a sign or fewer (two in a unit of 32 bits), or `BYTES`, 7 bits and a sign.
// Bytes are multiplied with weights that were made positive, w + WEIGHT_MAX; the surplus is subtracted first.
//
// Where processors add up bytes in 16 bits (CHAIN > 1), a row's range is such that sums fit: two products do, because neighbours
// are together at most PAIR_MAX; the products of a chain do, by the Cauchy-Schwarz inequality.
enum class Precision { HALVES, BYTES };

// Memory aligned to cache lines.
template <class T>
class Buffer {
   public:
    void need(size_t count) {
        if (count <= size_) return;
        memory_.reset();
        size_ = 0;
        memory_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
        size_ = count;
    }
    T* get() const { return memory_.get(); }

   private:
    struct Free {
        void operator()(T* memory) const { ::operator delete(memory, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

// Weights [columns, depth], each column (an output) in 8 bits with its own range, laid out in panels of WIDE columns.
struct Matrix {
    int columns = 0, depth = 0, units = 0, panels = 0;
    Precision precision = Precision::HALVES;
    float state_max = 0;  // the largest whole number of a state, so that sums stay below 2^31
    float chain_max = 0;  // the largest permitted length (root of the sum of squares) of the states of a chain
    Buffer<int8_t> packed;
    std::vector<float> scales;

    // `place[column]`: the position of a column among the `places` columns of the panels; positions without a column are zero.
    void pack(const float* weights, int count, int deep, const std::vector<int>& place, int places, Precision kind) {
        columns = places, depth = deep, precision = kind;
        const int of_unit = kind == Precision::HALVES ? 2 : 4;
        units = (deep + of_unit - 1) / of_unit;
        if (kind == Precision::BYTES) units = (units + CHAIN - 1) / CHAIN * CHAIN;
        panels = (places + WIDE - 1) / WIDE;
        const double most = 2147483647.0 / WEIGHT_MAX / deep;
        state_max = kind == Precision::BYTES ? BYTE_MAX : static_cast<float>(std::floor(most < 32767.0 ? most : 32767.0));
        const size_t bytes = static_cast<size_t>(panels) * units * of_unit * WIDE;
        packed.need(bytes);
        const int nothing = kind == Precision::BYTES ? static_cast<int>(WEIGHT_MAX) : 0;
        std::memset(packed.get(), nothing, bytes);
        scales.assign(static_cast<size_t>(panels) * WIDE, 0.0f);
        std::vector<int> squares(2 * units + 2);
        int most_squares = 1;
        for (int column = 0; column < count; ++column) {
            const float* from = weights + static_cast<size_t>(column) * deep;
            float most_of_all = 0;
            for (int k = 0; k < deep; ++k) most_of_all = std::abs(from[k]) > most_of_all ? std::abs(from[k]) : most_of_all;
            const float scale = most_of_all / WEIGHT_MAX, by = scale > 0 ? 1.0f / scale : 0.0f;
            const int panel = place[column] / WIDE, in_panel = place[column] % WIDE;
            int8_t* to = packed.get() + static_cast<size_t>(panel) * units * of_unit * WIDE;
            std::fill(squares.begin(), squares.end(), 0);
            for (int k = 0; k < deep; ++k) {
                const int whole = static_cast<int>(from[k] * by + (from[k] < 0 ? -0.5f : 0.5f));
                const int kept = whole > 127 ? 127 : whole < -127 ? -127 : whole;
                to[(static_cast<size_t>(k / of_unit) * WIDE + in_panel) * of_unit + k % of_unit] = static_cast<int8_t>(kept + nothing);
                squares[k / (4 * CHAIN) * 2 + k / 2 % 2] += kept * kept;
            }
            scales[place[column]] = scale;
            most_squares = std::max(most_squares, *std::max_element(squares.begin(), squares.end()));
        }
        chain_max = CHAIN_MAX / std::sqrt(static_cast<float>(most_squares)) - CHAIN_ROUNDING;
    }
};

// Rows of states in whole numbers, each with its own range; a row with NaN or infinity has the scale NaN.
struct Rounded {
    int units = 0, chains = 0;
    Buffer<int32_t> whole;
    Buffer<int32_t> surplus;  // for BYTES: the surplus, negative, of each chain, or of the row where sums have 32 bits
    Buffer<float> scales;

    void need(int rows, int depth) {
        units = (depth + 1) / 2 + 2 * LANES;
        chains = depth / (4 * CHAIN) + 1;
        whole.need(static_cast<size_t>(rows) * units);
        surplus.need(static_cast<size_t>(rows) * chains);
        scales.need(rows);
    }

    // `from` has memory for LANES more numbers, which are ignored.
    void put(int row, const float* from, const Matrix& of) {
        const int depth = of.depth;
        Floats most{}, wrong{};
        int k = 0;
        for (; k + LANES <= depth; k += LANES) {
            const Floats each = load(from + k);
            most = larger(most, size_of(each));
            wrong += each * Floats{};
        }
        float size = largest(most), no_number = sum(wrong);
        for (; k < depth; ++k) {
            size = std::fmax(size, std::fabs(from[k]));
            no_number += from[k] * 0.0f;
        }
        float scale = size / of.state_max;
#if defined(PASSES_CHAINS)
        if (of.precision == Precision::BYTES) scale = std::max(scale, chained_scale(from, of));
#endif
        const Floats by = same(scale > 0 ? 1.0f / scale : 0.0f);
        const bool is_number = no_number == 0.0f;
        scales.get()[row] = is_number ? scale : NAN;
        int32_t* to = whole.get() + static_cast<size_t>(row) * units;
        Ints total{};
        for (k = 0; k < depth; k += LANES) {
            Ints each = is_number ? rounded(load(from + k) * by) : Ints{};
            if (k + LANES > depth)
                for (int n = depth - k; n < LANES; ++n) each[n] = 0;
            total += each;
            if (of.precision == Precision::HALVES) store_halves(reinterpret_cast<int16_t*>(to) + k, each);
            else store_bytes(reinterpret_cast<int8_t*>(to) + k, each);
        }
        if (of.precision != Precision::BYTES) return;
        for (; k < of.units * 4; k += LANES) store_bytes(reinterpret_cast<int8_t*>(to) + k, Ints{});
        int32_t* taken = surplus.get() + static_cast<size_t>(row) * chains;
#if defined(PASSES_CHAINS)
        take_off(to, of.units, taken);
#else
        *taken = -static_cast<int32_t>(WEIGHT_MAX) * sum(total);
#endif
    }

   private:
#if defined(PASSES_CHAINS)
    // The smallest scale with which no sum of products overflows 16 bits.
    static float chained_scale(const float* from, const Matrix& of) {
        constexpr int STATES = 4 * CHAIN;
        Floats pair{}, squares{};
        int k = 0;
        for (; k + STATES <= of.depth; k += STATES) compare_chain(from + k, pair, squares);
        if (k < of.depth) {
            float rest[STATES] = {};
            std::copy(from + k, from + of.depth, rest);
            compare_chain(rest, pair, squares);
        }
        return std::max(largest(pair) / PAIR_MAX, std::sqrt(largest(squares)) / of.chain_max);
    }

    static void take_off(const int32_t* row, int units, int32_t* to) {
        const auto* states = reinterpret_cast<const int8_t*>(row);
        for (int unit = 0; unit < units; unit += CHAIN) {
            int low = 0, high = 0;
            for (int k = 4 * unit; k < 4 * (unit + CHAIN); k += 4) low += states[k] + states[k + 1], high += states[k + 2] + states[k + 3];
            constexpr int SURPLUS = static_cast<int>(WEIGHT_MAX);
            const auto halves = [](int each) { return static_cast<uint32_t>(static_cast<uint16_t>(-SURPLUS * each)); };
            to[unit / CHAIN] = static_cast<int32_t>(halves(low) | halves(high) << 16);
        }
    }
#endif
};

// Weights of a block as they are multiplied: bytes as stored, or widened to 16 bits.
template <Precision P, bool WIDENED>
INLINE Register weights_at(const int8_t* from, int half) {
    if constexpr (P == Precision::BYTES) return raw(from + half * LANES * 4);
    else if constexpr (WIDENED) return raw(from + half * LANES * 4);
    else return widened(from + half * LANES * 2);
}

// Sums of ROWS rows, as members, because a compiler keeps members in registers, but not always arrays.
template <int ROWS>
struct Sums {
    Register low, high;
    Sums<ROWS - 1> rest;

    INLINE void begin(const int32_t* from, size_t stride) { low = high = repeated(*from), rest.begin(from + stride, stride); }
    INLINE void load(const int32_t* from) { low = raw(from), high = raw(from + LANES), rest.load(from + WIDE); }
    INLINE void clear() { low = high = none(), rest.clear(); }
    INLINE void store(int32_t* to) const { keep(to, low), keep(to + LANES, high), rest.store(to + WIDE); }

    template <Precision P>
    INLINE void add(const int32_t* states, size_t stride, Register first, Register second) {
        const Register state = repeated(*states);
        Register below = P == Precision::BYTES ? add_products_of_bytes(low, state, first) : add_products_of_halves(low, state, first);
        Register above = P == Precision::BYTES ? add_products_of_bytes(high, state, second) : add_products_of_halves(high, state, second);
        in_turn(below, above);
        low = below, high = above;
        rest.template add<P>(states + stride, stride, first, second);
    }

    template <int UNITS, Precision P, bool WIDENED>
    INLINE void add_units(const int32_t* states, size_t stride, const int8_t* weights) {
        if constexpr (UNITS > 0) {
            add<P>(states, stride, weights_at<P, WIDENED>(weights, 0), weights_at<P, WIDENED>(weights, 1));
            add_units<UNITS - 1, P, WIDENED>(states + 1, stride, weights + WIDE * (P == Precision::BYTES || WIDENED ? 4 : 2));
        }
    }

    template <class Chain>  // a template, because `add_pairs` exists only for some processors
    INLINE void add_chain(const Chain& chain) {
        low = add_pairs(low, chain.low), high = add_pairs(high, chain.high);
        rest.add_chain(chain.rest);
    }
};

template <>
struct Sums<0> {
    INLINE void begin(const int32_t*, size_t) {}
    INLINE void load(const int32_t*) {}
    INLINE void clear() {}
    INLINE void store(int32_t*) const {}
    template <Precision P>
    INLINE void add(const int32_t*, size_t, Register, Register) {}
    template <class Chain>
    INLINE void add_chain(const Chain&) {}
};

// Add products of ROWS rows with a block of a panel to `sums` [ROWS, WIDE]; set them if `first`. `surplus`: for bytes, added, too.
template <int ROWS, Precision P, bool WIDENED>
inline void tile(const int32_t* states, size_t stride, const int32_t* surplus, size_t chains, const int8_t* weights, int units, int32_t* sums,
                 bool first) {
    constexpr size_t UNIT = WIDE * (P == Precision::BYTES || WIDENED ? 4 : 2);
    Sums<ROWS> found;
    if (!first) found.load(sums);
    else if (P == Precision::BYTES && CHAIN == 1) found.begin(surplus, chains);
    else found.clear();
    if constexpr (P == Precision::BYTES && CHAIN > 1) {
        for (int unit = 0; unit < units; unit += CHAIN) {
            Sums<ROWS> chain;
            chain.begin(surplus + unit / CHAIN, chains);
            chain.template add_units<CHAIN, P, WIDENED>(states + unit, stride, weights + unit * UNIT);
            found.add_chain(chain);
        }
    } else {
        for (int unit = 0; unit < units; ++unit) found.template add_units<1, P, WIDENED>(states + unit, stride, weights + unit * UNIT);
    }
    found.store(sums);
}

template <Precision P, bool WIDENED, int ROWS = ROWS_MAX>
inline void tile_of(int rows, const int32_t* states, size_t stride, const int32_t* surplus, size_t chains, const int8_t* weights, int units,
                    int32_t* sums, bool first) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<P, WIDENED, ROWS - 1>(rows, states, stride, surplus, chains, weights, units, sums, first);
    }
    tile<ROWS, P, WIDENED>(states, stride, surplus, chains, weights, units, sums, first);
}

// Prefetch the next block while this one is multiplied: the share of the tile of rows that starts at `row`.
inline void fetch(const int8_t* block, size_t bytes, int row, int rows) {
    const size_t share = (bytes * ROWS_MAX / rows + LINE_BYTES) / LINE_BYTES * LINE_BYTES, begin = share * (row / ROWS_MAX);
    for (size_t at = begin; at < begin + share && at < bytes; at += LINE_BYTES) __builtin_prefetch(block + bytes + at);
}

// Multiply rows with one panel; call `out(row, low, high)` with the results: LANES columns and the LANES next to them.
template <Precision P, class Out>
void multiply_panel(const Matrix& of, const Rounded& states, int begin, int end, int panel, Out&& out) {
    constexpr int OF_UNIT = P == Precision::HALVES ? 2 : 4;
    alignas(64) int32_t sums[BLOCK_ROWS * WIDE];
    alignas(64) int16_t wide[P == Precision::HALVES ? BLOCK_UNITS * WIDE * 2 : 1];
    const int8_t* weights = of.packed.get() + static_cast<size_t>(panel) * of.units * OF_UNIT * WIDE;
    const int count = end - begin;
    for (int start = 0; start < of.units; start += BLOCK_UNITS) {
        const int units = of.units - start < BLOCK_UNITS ? of.units - start : BLOCK_UNITS;
        const int8_t* block = weights + static_cast<size_t>(start) * OF_UNIT * WIDE;
        const bool widen = P == Precision::HALVES && count > ROWS_MAX;
        if (widen)
            for (int n = 0; n < units * WIDE * 2; n += 2 * LANES) keep(wide + n, widened(block + n));
        for (int row = 0; row < count; row += ROWS_MAX) {
            const int rows = count - row < ROWS_MAX ? count - row : ROWS_MAX;
            const int32_t* from = states.whole.get() + static_cast<size_t>(begin + row) * states.units + start;
            const int32_t* surplus = states.surplus.get() + static_cast<size_t>(begin + row) * states.chains + start / CHAIN;
            int32_t* to = sums + row * WIDE;
            fetch(block, static_cast<size_t>(units) * OF_UNIT * WIDE, row, count);
            if (widen) tile_of<P, true>(rows, from, states.units, surplus, states.chains, reinterpret_cast<const int8_t*>(wide), units, to, !start);
            else tile_of<P, false>(rows, from, states.units, surplus, states.chains, block, units, to, !start);
        }
    }
    const float* scales = of.scales.data() + static_cast<size_t>(panel) * WIDE;
    for (int row = 0; row < count; ++row) {
        const Floats scale = same(states.scales.get()[begin + row]);
        Floats found[2];
        for (int half = 0; half < 2; ++half) {
            found[half] = as_floats(load(sums + row * WIDE + half * LANES)) * scale * load(scales + half * LANES);
        }
        out(begin + row, found[0], found[1]);
    }
}

// Multiply rows with all panels; call `out(row, panel, low, high)` with the results.
template <class Out>
void multiply(Team& team, const Matrix& of, const Rounded& states, const Rows& rows, Out&& out) {
    const auto some = [&](int begin, int end, int first, int last) {
        for (int panel = first; panel < last; ++panel) {
            const auto each = [&](int row, Floats low, Floats high) { out(row, panel, low, high); };
            if (of.precision == Precision::BYTES) multiply_panel<Precision::BYTES>(of, states, begin, end, panel, each);
            else multiply_panel<Precision::HALVES>(of, states, begin, end, panel, each);
        }
    };
    const int blocks = (rows.end - rows.begin + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int wanted = rows.alone ? 1 : 6 * team.threads();
    const int together = of.panels > wanted ? of.panels / wanted : 1, groups = (of.panels + together - 1) / together;
    const auto piece = [&](int n) {
        const int begin = rows.begin + n / groups * BLOCK_ROWS, first = n % groups * together;
        some(begin, std::min(begin + BLOCK_ROWS, rows.end), first, std::min(first + together, of.panels));
    };
    if (!rows.alone) return team.each(blocks * groups, piece);
    for (int n = 0; n < blocks * groups; ++n) piece(n);
}

// Call `work` for blocks of rows, each by one thread; with few rows, once for all rows, by all threads together.
template <class Work>
void in_blocks(Team& team, int rows, Work&& work) {
    const int threads = team.threads(), tiles = (rows + ROWS_MAX - 1) / ROWS_MAX, most = BLOCK_ROWS / ROWS_MAX;
    if (threads > 1 && tiles < TILES_MIN * threads) return work(Rows{0, rows, false});
    const int blocks = ((tiles + most - 1) / most + threads - 1) / threads * threads;
    team.each(blocks, [&](int n) { work(Rows{tiles * n / blocks * ROWS_MAX, std::min(tiles * (n + 1) / blocks * ROWS_MAX, rows), true}); });
}

}  // namespace passes
