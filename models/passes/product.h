// Products of rows of states with a matrix of weights, added up in whole numbers: exact, so a row's answer is the same bits
// whatever other rows are multiplied with it, and in whatever order.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace passes {

constexpr float WEIGHT_MAX = 127.0f;
constexpr int BLOCK_UNITS = 192;  // of 32 bits for each column: such a block of weights stays in the nearest cache
constexpr int BLOCK_ROWS = 96;
constexpr size_t LINE_BYTES = 64;

// What a state is rounded to: `HALVES`, numbers of 15 bits or fewer (two in a unit of 32), or `BYTES`, numbers of 7 bits.
enum class Precision { HALVES, BYTES };

// Memory that begins where a line of the cache does.
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

// Weights [columns, depth], each column (an output) in 8 bits with a range of its own, laid out in panels of WIDE columns.
struct Matrix {
    int columns = 0, depth = 0, units = 0, panels = 0;
    Precision precision = Precision::HALVES;
    float state_max = 0;  // the largest whole number a state may be: sums then stay below 2 to the power of 31
    Buffer<int8_t> packed;
    std::vector<float> scales;
    std::vector<int32_t> offsets;  // BYTES: what is added to a state, so that it is not negative, times the weights

    // `place[column]`: where a column stands among the panels' columns; what stands nowhere is nothing.
    void pack(const float* weights, int count, int deep, const std::vector<int>& place, int places, Precision kind) {
        columns = places, depth = deep, precision = kind;
        const int of_unit = kind == Precision::HALVES ? 2 : 4;
        units = (deep + of_unit - 1) / of_unit;
        panels = (places + WIDE - 1) / WIDE;
        const double most = 2147483647.0 / WEIGHT_MAX / deep;
        state_max = kind == Precision::BYTES ? 127.0f : static_cast<float>(std::floor(most < 32767.0 ? most : 32767.0));
        const size_t bytes = static_cast<size_t>(panels) * units * of_unit * WIDE;
        packed.need(bytes);
        std::memset(packed.get(), 0, bytes);
        scales.assign(static_cast<size_t>(panels) * WIDE, 0.0f);
        offsets.assign(static_cast<size_t>(panels) * WIDE, 0);
        for (int column = 0; column < count; ++column) {
            const float* from = weights + static_cast<size_t>(column) * deep;
            float most_of_all = 0;
            for (int k = 0; k < deep; ++k) most_of_all = std::abs(from[k]) > most_of_all ? std::abs(from[k]) : most_of_all;
            const float scale = most_of_all / WEIGHT_MAX, by = scale > 0 ? 1.0f / scale : 0.0f;
            const int panel = place[column] / WIDE, in_panel = place[column] % WIDE;
            int8_t* to = packed.get() + static_cast<size_t>(panel) * units * of_unit * WIDE;
            int32_t total = 0;
            for (int k = 0; k < deep; ++k) {
                const int whole = static_cast<int>(from[k] * by + (from[k] < 0 ? -0.5f : 0.5f));
                const int kept = whole > 127 ? 127 : whole < -127 ? -127 : whole;
                to[(static_cast<size_t>(k / of_unit) * WIDE + in_panel) * of_unit + k % of_unit] = static_cast<int8_t>(kept);
                total += kept;
            }
            scales[place[column]] = scale;
            offsets[place[column]] = kind == Precision::BYTES ? 128 * total : 0;
        }
    }
};

// Rows of states in whole numbers, each with its range; a row that holds what is no number has none.
struct Rounded {
    int units = 0;
    Buffer<int32_t> whole;
    Buffer<float> scales;

    void need(int rows, int depth) {
        units = (depth + 1) / 2 + LANES;
        whole.need(static_cast<size_t>(rows) * units);
        scales.need(rows);
    }

    // `from` has room for LANES numbers more, which are ignored.
    void put(int row, const float* from, const Matrix& of) {
        const int depth = of.depth;
        Floats most{}, wrong{};
        int k = 0;
        for (; k + LANES <= depth; k += LANES) {
            const Floats each = load(from + k);
            most = larger(most, (Floats)((Ints)each & same(0x7fffffff)));
            wrong += each * Floats{};
        }
        float size = largest(most), no_number = sum(wrong);
        for (; k < depth; ++k) {
            size = std::fmax(size, std::fabs(from[k]));
            no_number += from[k] * 0.0f;
        }
        const Floats by = same(size > 0 ? of.state_max / size : 0.0f);
        scales.get()[row] = no_number == 0.0f ? size / of.state_max : NAN;
        int32_t* to = whole.get() + static_cast<size_t>(row) * units;
        for (k = 0; k < depth; k += LANES) {
            Ints each = rounded(load(from + k) * by);
            if (k + LANES > depth)
                for (int n = depth - k; n < LANES; ++n) each[n] = 0;
            if (of.precision == Precision::HALVES) store_halves(reinterpret_cast<int16_t*>(to) + k, each);
#if defined(PASSES_BYTES)
            else store_bytes(reinterpret_cast<uint8_t*>(to) + k, each + same(128));
#endif
        }
    }
};

// Weights of a block, as they are multiplied: of 8 bits as they lie, or read as numbers of 16.
template <Precision P, bool WIDENED>
inline Register weights_at(const int8_t* from, int unit, int half) {
    if constexpr (P == Precision::BYTES) return raw(from + (static_cast<size_t>(unit) * WIDE + half * LANES) * 4);
    else if constexpr (WIDENED) return raw(from + (static_cast<size_t>(unit) * WIDE + half * LANES) * 4);
    else return widened(from + (static_cast<size_t>(unit) * WIDE + half * LANES) * 2);
}

template <Precision P>
inline Register add_products(Register to, Register states, Register weights) {
#if defined(PASSES_BYTES)
    if constexpr (P == Precision::BYTES) return add_products_of_bytes(to, states, weights);
#endif
    return add_products_of_halves(to, states, weights);
}

// Add to `sums` [ROWS, WIDE] the products of ROWS rows with a block of a panel.
template <int ROWS, Precision P, bool WIDENED>
inline void tile(const int32_t* states, size_t stride, const int8_t* weights, int units, int32_t* sums, bool first) {
    Register found[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) found[r][half] = first ? none() : raw(sums + r * WIDE + half * LANES);
    for (int unit = 0; unit < units; ++unit) {
        const Register low = weights_at<P, WIDENED>(weights, unit, 0), high = weights_at<P, WIDENED>(weights, unit, 1);
        for (int r = 0; r < ROWS; ++r) {
            const Register state = repeated(states[r * stride + unit]);
            found[r][0] = add_products<P>(found[r][0], state, low);
            found[r][1] = add_products<P>(found[r][1], state, high);
            in_turn(found[r][0], found[r][1]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) keep(sums + r * WIDE + half * LANES, found[r][half]);
}

template <Precision P, bool WIDENED, int ROWS = ROWS_MAX>
inline void tile_of(int rows, const int32_t* states, size_t stride, const int8_t* weights, int units, int32_t* sums, bool first) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<P, WIDENED, ROWS - 1>(rows, states, stride, weights, units, sums, first);
    }
    tile<ROWS, P, WIDENED>(states, stride, weights, units, sums, first);
}

// Have the next block on its way while this one is multiplied: of it as much as falls to the rows from `row` on.
inline void fetch(const int8_t* block, size_t bytes, int row, int rows) {
    const size_t share = (bytes * ROWS_MAX / rows + LINE_BYTES) / LINE_BYTES * LINE_BYTES, begin = share * (row / ROWS_MAX);
    for (size_t at = begin; at < begin + share && at < bytes; at += LINE_BYTES) __builtin_prefetch(block + bytes + at);
}

// Multiply rows with one panel, and tell `out(row, low, high)` what comes of it: LANES columns and the LANES next to them.
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
            int32_t* to = sums + row * WIDE;
            fetch(block, static_cast<size_t>(units) * OF_UNIT * WIDE, row, count);
            if (widen) tile_of<P, true>(rows, from, states.units, reinterpret_cast<const int8_t*>(wide), units, to, !start);
            else tile_of<P, false>(rows, from, states.units, block, units, to, !start);
        }
    }
    const float* scales = of.scales.data() + static_cast<size_t>(panel) * WIDE;
    const int32_t* offsets = of.offsets.data() + static_cast<size_t>(panel) * WIDE;
    for (int row = 0; row < count; ++row) {
        const Floats scale = same(states.scales.get()[begin + row]);
        Floats found[2];
        for (int half = 0; half < 2; ++half) {
            const Ints exact = load(sums + row * WIDE + half * LANES) - load(offsets + half * LANES);
            found[half] = as_floats(exact) * scale * load(scales + half * LANES);
        }
        out(begin + row, found[0], found[1]);
    }
}

// Multiply all rows with all panels, by every thread of a team; `out(row, panel, low, high)`.
template <class Out>
void multiply(Team& team, const Matrix& of, const Rounded& states, int rows, Out&& out) {
    const int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int wanted = team.threads() == 1 ? 1 : 6 * team.threads();
    const int together = of.panels > wanted ? of.panels / wanted : 1, groups = (of.panels + together - 1) / together;
    team.each(blocks * groups, [&](int piece) {
        const int begin = piece / groups * BLOCK_ROWS, first = piece % groups * together;
        const int end = begin + BLOCK_ROWS < rows ? begin + BLOCK_ROWS : rows;
        for (int panel = first; panel < first + together && panel < of.panels; ++panel) {
            const auto each = [&](int row, Floats low, Floats high) { out(row, panel, low, high); };
#if defined(PASSES_BYTES)
            if (of.precision == Precision::BYTES) {
                multiply_panel<Precision::BYTES>(of, states, begin, end, panel, each);
                continue;
            }
#endif
            multiply_panel<Precision::HALVES>(of, states, begin, end, panel, each);
        }
    });
}

}  // namespace passes
