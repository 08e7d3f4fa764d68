// Vectors of LANES numbers, which the processor computes at once. The same sources are compiled once for each kind of processor,
// and for tests in plain C++ (PASSES_PLAIN) with the layout of the widest registers, so that this code runs on any machine.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace passes {

#if defined(PASSES_PLAIN) || defined(__AVX512VNNI__)
constexpr int LANES = 16;   // numbers of 32 bits in a register
constexpr int ROWS_MAX = 12;  // rows of a tile: two registers each, of 32
constexpr int CHAIN = 1;  // the units over which products of bytes are added up in 16 bits; 1: they are added up in 32
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ROWS_MAX = 6;  // two registers each, of 16
#define PASSES_CHAINS
constexpr int CHAIN = 4;
#else
#error "written for AVX2 with FMA, and for AVX-512 with VNNI"
#endif
constexpr int LANES_BITS = LANES == 16 ? 4 : 3;
constexpr int WIDE = 2 * LANES;  // columns of a tile

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t Longs __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline Ints load(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }
inline void store(int32_t* to, Ints value) { *reinterpret_cast<Ints*>(to) = value; }
inline Floats same(float value) { return value - Floats{}; }
inline Ints halves(const int16_t* from) { return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints); }
inline Ints same(int32_t value) { return value - Ints{}; }
constexpr int32_t SIGN = INT32_MIN;  // the sign bit of a number of 32 bits
inline Floats size_of(Floats value) { return (Floats)((Ints)value & same(~SIGN)); }

inline int32_t sum(Ints value) {
    int32_t found = 0;
    for (int n = 0; n < LANES; ++n) found += value[n];
    return found;
}

// Keep sums in their registers, and later reads after this point: otherwise a compiler runs out of registers.
template <class Vector>
inline void in_turn([[maybe_unused]] Vector& low, [[maybe_unused]] Vector& high) {
    #if !defined(PASSES_PLAIN)
    __asm__ volatile("" : "+v"(low), "+v"(high)::"memory");
#endif
}

#if defined(PASSES_PLAIN)
typedef Ints Register;
#define EACH(expression)                                        \
    do {                                                        \
        for (int n = 0; n < LANES; ++n) found[n] = expression;  \
        return found;                                           \
    } while (false)
inline Floats as_floats(Ints value) { return __builtin_convertvector(value, Floats); }
inline Ints rounded(Floats value) { Ints found; EACH(static_cast<int32_t>(std::nearbyint(value[n]))); }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats product_and_sum(Floats a, Floats b, Floats c) { Floats found; EACH(std::fma(a[n], b[n], c[n])); }
inline float sum(Floats value) {
    float found = 0;
    for (int n = 0; n < LANES; ++n) found += value[n];
    return found;
}
inline float largest(Floats value) {
    float found = value[0];
    for (int n = 1; n < LANES; ++n) found = value[n] > found ? value[n] : found;
    return found;
}
inline Floats exchanged(Floats value, Ints from) { Floats found; EACH(value[from[n]]); }
// Return the numbers of the lower, or UPPER, halves of two registers, alternately.
template <bool UPPER>
inline Ints in_turns(Ints a, Ints b) { Ints found; EACH(n % 2 ? b[n / 2 + UPPER * LANES / 2] : a[n / 2 + UPPER * LANES / 2]); }
inline void store_halves(int16_t* to, Ints value) {
    for (int n = 0; n < LANES; ++n) to[n] = static_cast<int16_t>(value[n]);
}
inline void store_bytes(int8_t* to, Ints value) {
    for (int n = 0; n < LANES; ++n) to[n] = static_cast<int8_t>(value[n]);
}
inline Register raw(const void* from) { return load(static_cast<const int32_t*>(from)); }
inline void keep(void* to, Register value) { store(static_cast<int32_t*>(to), value); }
inline Register widened(const int8_t* from) {
    int16_t wide[2 * LANES];
    for (int n = 0; n < 2 * LANES; ++n) wide[n] = from[n];
    return raw(wide);
}
inline Register repeated(int32_t unit) { return same(unit); }
inline Register none() { return Register{}; }
inline Register add_products_of_halves(Register to, Register a, Register b) {
    Register found;
    EACH(to[n] + static_cast<int16_t>(a[n]) * static_cast<int16_t>(b[n]) + (a[n] >> 16) * (b[n] >> 16));
}
inline Register add_products_of_bytes(Register to, Register states, Register weights) {
    for (int n = 0; n < LANES; ++n)
        for (int at = 0; at < 32; at += 8) to[n] += static_cast<int8_t>(states[n] >> at) * static_cast<uint8_t>(weights[n] >> at);
    return to;
}
#undef EACH
#elif defined(__AVX512VNNI__)
typedef __m512i Register;
inline Floats as_floats(Ints value) { return (Floats)_mm512_cvtepi32_ps((__m512i)value); }
inline Ints rounded(Floats value) { return (Ints)_mm512_cvtps_epi32((__m512)value); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats product_and_sum(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline float sum(Floats value) { return _mm512_reduce_add_ps((__m512)value); }
inline float largest(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
inline Floats exchanged(Floats value, Ints from) { return (Floats)_mm512_permutexvar_ps((__m512i)from, (__m512)value); }
template <bool UPPER>
inline Ints in_turns(Ints a, Ints b) {
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (Ints)_mm512_permutex2var_epi32((__m512i)a, _mm512_add_epi32(from, _mm512_set1_epi32(UPPER * LANES / 2)), (__m512i)b);
}
inline void store_halves(int16_t* to, Ints value) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16((__m512i)value)); }
inline void store_bytes(int8_t* to, Ints value) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8((__m512i)value)); }
// Return 2 LANES bytes as numbers of 16 bits.
inline Register widened(const int8_t* from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)); }
inline Register raw(const void* from) { return _mm512_loadu_si512(from); }
inline void keep(void* to, Register value) { _mm512_storeu_si512(to, value); }
inline Register repeated(int32_t unit) { return _mm512_set1_epi32(unit); }
inline Register none() { return _mm512_setzero_si512(); }
inline Register add_products_of_halves(Register to, Register a, Register b) { return _mm512_dpwssd_epi32(to, a, b); }
inline Register add_products_of_bytes(Register to, Register states, Register weights) { return _mm512_dpbusd_epi32(to, weights, states); }
#else
typedef __m256i Register;
inline Floats as_floats(Ints value) { return (Floats)_mm256_cvtepi32_ps((__m256i)value); }
inline Ints rounded(Floats value) { return (Ints)_mm256_cvtps_epi32((__m256)value); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats product_and_sum(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline float sum(Floats value) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float largest(Floats value) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
inline Floats exchanged(Floats value, Ints from) { return (Floats)_mm256_permutevar8x32_ps((__m256)value, (__m256i)from); }
template <bool UPPER>
inline Ints in_turns(Ints a, Ints b) {
    const __m256i low = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b), high = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
    return (Ints)_mm256_permute2x128_si256(low, high, UPPER ? 0x31 : 0x20);
}
inline void store_halves(int16_t* to, Ints value) {
    const __m256i packed = _mm256_packs_epi32((__m256i)value, (__m256i)value);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
}
inline Register widened(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }
inline Register raw(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void keep(void* to, Register value) { _mm256_storeu_si256((__m256i*)to, value); }
inline Register repeated(int32_t unit) { return _mm256_set1_epi32(unit); }
inline Register none() { return _mm256_setzero_si256(); }
inline Register add_products_of_halves(Register to, Register a, Register b) {
    return _mm256_add_epi32(to, _mm256_madd_epi16(a, b));
}
inline void store_bytes(int8_t* to, Ints value) {
    const __m256i halves = _mm256_packs_epi32((__m256i)value, (__m256i)value), bytes = _mm256_packs_epi16(halves, halves);
    const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(to, &low, 4), std::memcpy(to + 4, &high, 4);
}
// Add up in 16 bits, two products each. Intermediate sums may wrap around; the final sum of a chain fits.
inline Register add_products_of_bytes(Register to, Register states, Register weights) {
    return _mm256_add_epi16(to, _mm256_maddubs_epi16(weights, states));
}
// Raise `pair` and `squares` to the maxima in a chain of 16 states: of two neighbours' sizes, and of the squares in a 16-bit sum.
inline void compare_chain(const float* from, Floats& pair, Floats& squares) {
    const auto neighbours = [](Floats each) { return (Floats)_mm256_permute_ps((__m256)each, 0b10110001); };
    const Floats first = load(from), second = load(from + LANES);
    for (const Floats each : {first, second}) {
        const Floats size = size_of(each);
        pair = larger(pair, size + neighbours(size));
    }
    const Floats both = product_and_sum(first, first, second * second), two = both + neighbours(both);
    squares = larger(squares, two + (Floats)_mm256_permute2f128_ps((__m256)two, (__m256)two, 1));
}
inline Register add_pairs(Register to, Register pairs) { return _mm256_add_epi32(to, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
#endif

// Return 0, 1, ... LANES - 1.
inline Ints numbered() {
    Ints found{};
    for (int n = 0; n < LANES; ++n) found[n] = n;
    return found;
}

// Transpose LANES registers of LANES numbers.
inline void transpose(Ints (&rows)[LANES]) {
    for (int round = 0; round < LANES_BITS; ++round) {
        Ints found[LANES];
#pragma GCC unroll 8
        for (int n = 0; n < LANES / 2; ++n) {
            found[2 * n] = in_turns<false>(rows[n], rows[n + LANES / 2]);
            found[2 * n + 1] = in_turns<true>(rows[n], rows[n + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < LANES; ++n) rows[n] = found[n];
    }
}

// Return e to the power of x, for x <= 0; 0 below -80. Relative error below 3e-7.
inline Floats exponential(Floats x) {
    const Ints none = x < same(-80.0f);
    const Floats from = larger(x, same(-80.0f));
    const Ints whole = rounded(from * same(1.44269504088896341f));
    const Floats by = as_floats(whole);
    const Floats rest = product_and_sum(by, same(2.12194440e-4f), product_and_sum(by, same(-0.693359375f), from));
    Floats series = same(1.9875691500e-4f);
    series = product_and_sum(series, rest, same(1.3981999507e-3f));
    series = product_and_sum(series, rest, same(8.3334519073e-3f));
    series = product_and_sum(series, rest, same(4.1665795894e-2f));
    series = product_and_sum(series, rest, same(1.6666665459e-1f));
    series = product_and_sum(series, rest, same(5.0000001201e-1f));
    series = product_and_sum(series, rest * rest, rest + same(1.0f));
    const Floats power = (Floats)((whole + same(127)) << 23);
    return none ? Floats{} : series * power;
}

}  // namespace passes
