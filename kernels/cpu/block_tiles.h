// How weights in blocks are kept to be multiplied with: tiles of 8 outputs, and the few operations on them that differ
// from CPU to CPU.
//
// A row of a GGUF file lies by itself, so a product row by row ends in sums across a register and handles each row's
// scale alone. In a tile the 8 outputs are 8 lanes: scales, minima and sums of all are one operation. Codes, scales and
// minima are the file's, in another order; nothing is rounded, and 256 weights take at most 3 % more bytes.
//
// Layout of a tile: its blocks (of 32 or 256 inputs) one after another, each
//   fp16 d[8], fp16 m[8] where there are minima
//   scales [groups][8], minima [groups][8]: bytes; Q2_K: one byte, the scale in its low half   (K-quants, IQ4_XS)
//   padding to 32 bytes in blocks of 256
//   codes, a unit of 32 inputs x 8 outputs after another, in planes of 8, 4, 2 and 1 bits a code (5 bits: 4 + 1)
// Where a code's bits are within a plane depends on what the CPU can take apart at once: `place`.
//
// Inputs are integers of 16 or 8 bits (BITS): x = scale * q, |q| <= 127 * 128 or 127, one scale for 32 inputs, so that an
// input errs by at most 2^-15 or 2^-8 of the largest beside it. Products of a group are summed exactly in int32, whatever
// the CPU; an instruction multiplies twice as many numbers of 8 bits as of 16, and their codes need less taking apart:
//   x86   16  codes widened to int16: vpmaddwd and an addition, or one vpdpwssd (AVX-VNNI, AVX-512 VNNI)
//         8   codes as bytes: vpdpbusd, which wants codes without sign; or vpmaddubsw, vpmaddwd and an addition, where the
//             sum of two products must fit int16, so that codes with a sign stay below 129
//   ARM   16  q as two bytes, 128 * high + low: sdot, or smmla (i8mm), whose two columns are the high and the low bytes
//         8   sdot
//   else  plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "block_formats.h"
#include "block_kind.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define MINIVLLM_BLOCKS_X86 1
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define MINIVLLM_BLOCKS_ARM 1
#endif

namespace minivllm {

constexpr int RADIX_BITS = 7;  // of q's two bytes
// What the largest of a unit's inputs becomes.
constexpr float largest_q(int bits) { return bits == 8 ? 127 : 127 * 128; }

// Bits of each plane of a kind's codes: 5 is 4 + 1, 6 is 4 + 2, 3 is 2 + 1.
constexpr int wide_plane(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : 2; }
constexpr int narrow_plane(int bits) { return bits - wide_plane(bits); }
constexpr int plane_bytes(int bits) { return UNIT * OUTPUTS * bits / 8; }

template <BlockKind K>
struct Tile {
  static constexpr Format F = format_of(K);
  static constexpr int GROUPS = F.block / F.group, UNITS = F.block / UNIT;
  static constexpr bool SHARED = K == BlockKind::Q2_K;  // scale and minimum are halves of one byte
  static constexpr int SCALES_AT = (F.minima ? 4 : 2) * OUTPUTS;
  static constexpr int MINIMA_AT = SCALES_AT + (SHARED ? 0 : GROUPS * OUTPUTS);
  static constexpr int SCALES_END =
      !F.scales ? SCALES_AT : (F.minima && !SHARED ? MINIMA_AT : SCALES_AT) + GROUPS * OUTPUTS;
  static constexpr int CODES_AT = F.scales ? (SCALES_END + 31) / 32 * 32 : SCALES_END;
  static constexpr int UNIT_CODES = plane_bytes(F.bits);
  static constexpr int BYTES = CODES_AT + UNITS * UNIT_CODES;  // of a block of 8 outputs
};

// The bit at which a plane's part of the code of input i (< 32) and output n (< 8) begins.
constexpr int place(int plane, int n, int i) {
  const int j = i / 8, r = i % 8;
  if (plane == 8) return (2 * j + r % 2) * 256 + n * 32 + r / 2 * 8;
  if (plane == 4) return j * 256 + n * 32 + r * 4;
#ifdef MINIVLLM_BLOCKS_ARM  // as the bytes of plane 8, several to a byte, for 4 outputs at a time
  const int half = n / 4, byte = n % 4 * 4 + r / 2;
  if (plane == 2) return (half * 2 + j / 2) * 128 + byte * 8 + 2 * (j % 2 * 2 + r % 2);
  return half * 128 + byte * 8 + 2 * j + r % 2;
#else  // as the bytes of plane 4, so that a shift brings them beside those
  const int byte = n * 4 + r / 2;
  if (plane == 2) return j / 2 * 256 + byte * 8 + 2 * (j % 2 * 2 + r % 2);
  return byte * 8 + 2 * j + r % 2;
#endif
}

// Bits `shift` and up of 32 codes into a plane, which is zeroed.
template <int PLANE>
inline void put(int n, const uint8_t* codes, int shift, uint8_t* to) {
#if defined(MINIVLLM_BLOCKS_X86) && defined(__BMI2__)  // 8 codes at a time, where `place` has them side by side
  constexpr uint64_t EACH = 0x0101010101010101u, MASK = (1 << PLANE) - 1;
  auto word = [&](int at) { return to + 32 * at + 4 * n; };
  uint32_t words[2] = {};
  for (int j = 0; j < 4; j++) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * j, 8);
    if constexpr (PLANE == 8) {
      for (int e = 0; e < 2; e++) {
        const uint32_t four = uint32_t(_pext_u64(eight, 0x00ff00ff00ff00ffu << 8 * e));
        std::memcpy(word(2 * j + e), &four, 4);
      }
    } else {
      const uint32_t bits = uint32_t(_pext_u64(eight >> shift, EACH * MASK));
      if constexpr (PLANE == 4) std::memcpy(word(j), &bits, 4);
      else {
        constexpr uint32_t TWO = (1u << 2 * PLANE) - 1;  // codes, of each byte
        const int at = 2 * PLANE * (PLANE == 2 ? j % 2 : j);
        words[PLANE == 2 ? j / 2 : 0] |= _pdep_u32(bits, TWO * 0x01010101u) << at;
      }
    }
  }
  if constexpr (PLANE < 4)
    for (int i = 0; i < PLANE; i++) std::memcpy(word(i), &words[i], 4);
#else
  constexpr int MASK = (1 << PLANE) - 1;
#pragma GCC unroll 32
  for (int i = 0; i < UNIT; i++) {
    const int at = place(PLANE, n, i);
    to[at / 8] |= (codes[i] >> shift & MASK) << at % 8;
  }
#endif
}

// One block of one output into its tile, which is zeroed.
template <BlockKind K>
inline void pack_block(const uint8_t* raw, int n, uint8_t* tile) {
  typedef Tile<K> T;
  constexpr Format F = T::F;
  Block b;
  take_apart<K>(raw, b);
  std::memcpy(tile + 2 * n, &b.d, 2);
  if (F.minima) std::memcpy(tile + 2 * (OUTPUTS + n), &b.m, 2);
  if (F.scales)
    for (int g = 0; g < T::GROUPS; g++) {
      tile[T::SCALES_AT + g * OUTPUTS + n] = uint8_t(b.scales[g]) | (T::SHARED ? b.minima[g] << 4 : 0);
      if (F.minima && !T::SHARED) tile[T::MINIMA_AT + g * OUTPUTS + n] = b.minima[g];
    }
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  for (int u = 0; u < T::UNITS; u++) {
    uint8_t* to = tile + T::CODES_AT + u * T::UNIT_CODES;
    put<WIDE>(n, b.codes + u * UNIT, 0, to);
    if constexpr (NARROW > 0)
      put<NARROW>(n, b.codes + u * UNIT, WIDE, to + plane_bytes(WIDE));
  }
}

template <int BITS>
using Integer = std::conditional_t<BITS == 8, int8_t, int16_t>;

// A unit's inputs as integers, see minivllm_integers; q in the order that this CPU's products want.
struct UnitOfX {
  int8_t* q;
  float* scales;
  int32_t* sums;
};

#ifndef MINIVLLM_BLOCKS_X86
template <int BITS>
inline void arrange(const int32_t* q, int8_t* to) {
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < 8; r++) {
      const int32_t value = q[8 * j + r];
#ifdef MINIVLLM_BLOCKS_ARM  // of 8 inputs the even ones first; of 16 bits the high bytes, then the low ones
      int8_t* at = to + unit_bytes(BITS) / 4 * j + 4 * (r % 2) + r / 2;
      const int32_t high = (value + (1 << (RADIX_BITS - 1))) >> RADIX_BITS;
      at[0] = int8_t(BITS == 8 ? value : high);
      if (BITS == 16) at[8] = int8_t(value - high * (1 << RADIX_BITS));
#else  // inputs i and i + 4 of 8 side by side
      reinterpret_cast<Integer<BITS>*>(to)[8 * j + 2 * (r % 4) + r / 4] = Integer<BITS>(value);
#endif
    }
}
#endif

template <int BITS>
inline void to_integers(const float* x, UnitOfX to) {
#ifdef MINIVLLM_BLOCKS_X86
  const __m256 sign = _mm256_set1_ps(-0.f);
  __m256 v[4], largest = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q));
  }
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  const float most = _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
  const bool finite = most < std::numeric_limits<float>::infinity() && !_mm256_movemask_ps(odd);
#else
  float most = 0.f;
  bool finite = true;
  for (int i = 0; i < UNIT; i++) {
    most = std::max(most, std::fabs(x[i]));
    finite &= std::fabs(x[i]) < std::numeric_limits<float>::infinity();  // false of NaN, too
  }
#endif
  // NaN and infinity must not become a number; what is too small to have an inverse is 0.
  const bool some = finite && most > 1e-30f;
  const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : some ? most / largest_q(BITS) : 0.f;
  const float inverse = some ? largest_q(BITS) / most : 0.f;
#ifdef MINIVLLM_BLOCKS_X86
  __m256i q[4];
  const __m256 times = _mm256_set1_ps(inverse);
  for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], times));
  if (!some) q[0] = q[1] = q[2] = q[3] = _mm256_setzero_si256();
  // Inputs of a block of 8 as its codes are side by side in a register: (i, i + 4) in words, (0, 2, 4, 6) and (1, 3, 5, 7)
  // in bytes.
  auto store = [&](int at, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.q + at), x); };
  const __m256i first = _mm256_packs_epi32(q[0], q[1]), second = _mm256_packs_epi32(q[2], q[3]);  // quarters 0, 2, 1, 3
  if constexpr (BITS == 16) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    store(0, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(first, 0xd8), order));
    store(32, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(second, 0xd8), order));
  } else {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m256i eighths = _mm256_packs_epi16(first, second);  // 0, 2, 4, 6, 1, 3, 5, 7
    const __m256i blocks = _mm256_permutevar8x32_epi32(eighths, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    store(0, _mm256_shuffle_epi8(blocks, order));
  }
  for (int i = 0; i < 2; i++) {
    const __m256i pairs = _mm256_add_epi32(q[2 * i], q[2 * i + 1]);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    to.sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }
#else
  int32_t q[UNIT];
  for (int i = 0; i < UNIT; i++) q[i] = some ? int32_t(std::nearbyint(x[i] * inverse)) : 0;
  arrange<BITS>(q, to.q);
  for (int half = 0; half < 2; half++) {
    to.sums[half] = 0;
    for (int i = 0; i < UNIT / 2; i++) to.sums[half] += q[half * UNIT / 2 + i];
  }
#endif
  to.scales[0] = scale;
  to.scales[1] = scale * float(to.sums[0] + to.sums[1]);
  for (int half = 0; half < 2; half++) to.scales[2 + half] = scale * float(to.sums[half]);
}

// ----------------------------------------------------------------------------------------- eight lanes of one CPU
//
// Codes: weights of 8 inputs, widened. Sums: int32 of 8 outputs. Lanes: float of 8 outputs.

#if defined(MINIVLLM_BLOCKS_X86)

typedef __m256 Lanes;
template <int BITS>
constexpr int PARTS = BITS / 4;  // of 32 bits an output: what one instruction multiplies
template <int BITS>
struct Codes {
  __m256i parts[PARTS<BITS>];  // of each output inputs (i, i + 4), or (i, i + 2, i + 4, i + 6)
};
template <int BITS>
struct Sums {
  __m256i v;
};

inline Lanes load_lanes(const float* p) { return _mm256_loadu_ps(p); }
inline void store_lanes(float* p, Lanes x) { _mm256_storeu_ps(p, x); }
inline Lanes lanes_of(float x) { return _mm256_set1_ps(x); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Lanes bytes(const uint8_t* p, bool is_signed, int shift, int mask) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m256i wide = is_signed ? _mm256_cvtepi8_epi32(raw) : _mm256_cvtepu8_epi32(raw);
  return _mm256_cvtepi32_ps(mask == 255 ? wide : _mm256_and_si256(_mm256_srli_epi32(wide, shift), _mm256_set1_epi32(mask)));
}

template <int BITS>
inline Sums<BITS> begin_sums(int32_t x) { return {_mm256_set1_epi32(x)}; }
template <int BITS>
inline Sums<BITS> operator+(Sums<BITS> a, Sums<BITS> b) { return {_mm256_add_epi32(a.v, b.v)}; }
template <int BITS>
inline Lanes to_lanes(Sums<BITS> s) { return _mm256_cvtepi32_ps(s.v); }

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define MINIVLLM_BLOCKS_VNNI 1
#endif

// What is still to be taken from each code: a group's sums begin with so many times the inputs' sum, and it takes no
// instruction of its own. Values of 8 bits with a sign are kept as they are where a sum of two products would not fit.
template <BlockKind K, int BITS>
constexpr bool WITH_SIGN =
#ifdef MINIVLLM_BLOCKS_VNNI
    false;
#else
    BITS == 8 && (format_of(K).is_signed || format_of(K).table);
#endif
template <BlockKind K, int BITS>
constexpr int OFFSET = WITH_SIGN<K, BITS> ? 0 : BITS == 8 && format_of(K).is_signed ? 128 : format_of(K).offset;

template <BlockKind K, int BITS>
inline __attribute__((always_inline)) __m256i multiply_add(__m256i sum, __m256i codes, __m256i q) {
#ifdef MINIVLLM_BLOCKS_VNNI
#ifdef __AVX512VNNI__
  return BITS == 8 ? _mm256_dpbusd_epi32(sum, codes, q) : _mm256_dpwssd_epi32(sum, codes, q);
#else
  return BITS == 8 ? _mm256_dpbusd_avx_epi32(sum, codes, q) : _mm256_dpwssd_avx_epi32(sum, codes, q);
#endif
#else
  if constexpr (BITS == 8) {
    const __m256i size = WITH_SIGN<K, BITS> ? _mm256_abs_epi8(codes) : codes;
    const __m256i two = _mm256_maddubs_epi16(size, WITH_SIGN<K, BITS> ? _mm256_sign_epi8(q, codes) : q);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
  } else {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, q));
  }
  asm("" : "+x"(sum));  // else GCC adds products in another order, for which it has too few registers
  return sum;
#endif
}

inline __m256i shifted_left(__m256i x, int bits) { return bits > 0 ? _mm256_slli_epi16(x, bits) : _mm256_srli_epi16(x, -bits); }

// Part i of block j of 8 inputs of a unit: shifts do not mind that a word has two bytes, masks clear what comes across.
template <BlockKind K, int BITS>
inline __attribute__((always_inline)) __m256i widen_part(const uint8_t* unit, int j, int i) {
  constexpr Format F = format_of(K);
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  auto load = [](const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  auto mask = [](int bits) { return BITS == 8 ? _mm256_set1_epi8(bits) : _mm256_set1_epi16(bits); };
  // Where the part's codes are: of the two in a byte of plane 4 the first or second, and of 16 bits in the low or high byte.
  const int byte = BITS == 16 ? 8 * (i / 2) : 0;
  __m256i part;
  if constexpr (WIDE == 8) {
    part = load(unit + 32 * (2 * j + i % 2));
    if constexpr (BITS == 16) return _mm256_srai_epi16(byte ? part : _mm256_slli_epi16(part, 8), 8);
  } else {
    const int at = byte + WIDE * (i % 2) + (WIDE == 2 ? 4 * (j % 2) : 0);
    part = shifted_left(load(unit + 32 * (WIDE == 4 ? j : j / 2)), -at);
    if (BITS == 8 || at + WIDE < 16) part = _mm256_and_si256(part, mask((1 << WIDE) - 1));
  }
  if constexpr (NARROW > 0) {
    const __m256i packed = load(unit + plane_bytes(WIDE) + (NARROW == 2 ? 32 * (j / 2) : 0));
    const int more = byte + NARROW * (i % 2) + (NARROW == 2 ? 4 * (j % 2) : 2 * j);
    part = _mm256_or_si256(part, _mm256_and_si256(shifted_left(packed, WIDE - more), mask(((1 << NARROW) - 1) << WIDE)));
  }
  if constexpr (F.table) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(IQ4_VALUES)));
    const __m256i taken = WITH_SIGN<K, BITS> ? _mm256_sub_epi8(values, _mm256_set1_epi8(127)) : values;
    part = _mm256_shuffle_epi8(taken, part);  // IQ4_VALUES[0] is 0: high bytes of 16 bits stay 0
  }
  if constexpr (F.is_signed && !WITH_SIGN<K, BITS>) part = _mm256_xor_si256(part, _mm256_set1_epi8(char(128)));
  return part;
}

// Block j of 8 inputs of a unit.
template <BlockKind K, int BITS>
inline __attribute__((always_inline)) Codes<BITS> widen(const uint8_t* unit, int j) {
  Codes<BITS> codes;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS<BITS>; i++) codes.parts[i] = widen_part<K, BITS>(unit, j, i);
  return codes;
}

inline __m256i spread_part(const int8_t* x, int i) {
  int32_t part;
  std::memcpy(&part, x + 4 * i, 4);
  return _mm256_set1_epi32(part);
}

// Sums of a block of 8 inputs, for one token; x: block j's part of q.
template <BlockKind K, int BITS>
inline __attribute__((always_inline)) Sums<BITS> dot(Sums<BITS> sum, const Codes<BITS>& codes, const int8_t* x) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS<BITS>; i++) sum.v = multiply_add<K, BITS>(sum.v, codes.parts[i], spread_part(x, i));
  return sum;
}

// The same for T tokens and N tiles: each part of the inputs is spread once for all tiles, each part of codes loaded once
// for all tokens.
template <BlockKind K, int BITS, int T, int N>
inline __attribute__((always_inline)) void dots(Sums<BITS> (&sums)[T][N], const Codes<BITS>* const (&codes)[N],
                                                const int8_t* const (&x)[T]) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS<BITS>; i++) {
    __m256i w[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) w[n] = codes[n]->parts[i];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const __m256i spread = spread_part(x[t], i);
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) sums[t][n].v = multiply_add<K, BITS>(sums[t][n].v, w[n], spread);
    }
  }
}

#elif defined(MINIVLLM_BLOCKS_ARM)

struct Lanes {
  float32x4_t v[2];
};
template <int BITS>
struct Codes {
  // [outputs 0-3, 4-7][inputs 0, 2, 4, 6; 1, 3, 5, 7] or, of 16 bits with i8mm, [..][2 outputs x 8 inputs]
  int8x16_t quads[2][2];
};
template <int BITS>
struct Sums;
template <>
struct Sums<16> {
#ifdef __ARM_FEATURE_MATMUL_INT8
  int32x4_t v[4];  // of two outputs: high, low, high, low
#else
  int32x4_t high[2], low[2];
#endif
  int32_t begin;
};
template <>
struct Sums<8> {
  int32x4_t v[2];
};

inline Lanes load_lanes(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
inline void store_lanes(float* p, Lanes x) {
  vst1q_f32(p, x.v[0]);
  vst1q_f32(p + 4, x.v[1]);
}
inline Lanes lanes_of(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {{vfmaq_f32(c.v[0], a.v[0], b.v[0]), vfmaq_f32(c.v[1], a.v[1], b.v[1])}};
}
inline Lanes times(Lanes a, Lanes b) { return {{vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1])}}; }
inline Lanes halves(const uint8_t* p) {
  const float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(p));
  return {{vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)}};
}
inline Lanes bytes(const uint8_t* p, bool is_signed, int shift, int mask) {
  int16x8_t wide;
  if (is_signed) wide = vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p)));
  else wide = vreinterpretq_s16_u16(vandq_u16(vshlq_u16(vmovl_u8(vld1_u8(p)), vdupq_n_s16(-shift)), vdupq_n_u16(mask)));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))}};
}

template <int BITS>
inline Sums<BITS> begin_sums(int32_t x) {
  Sums<BITS> s;
  if constexpr (BITS == 8) {
    s.v[0] = s.v[1] = vdupq_n_s32(x);
  } else {
    const int32x4_t zero = vdupq_n_s32(0);
#ifdef __ARM_FEATURE_MATMUL_INT8
    for (auto& v : s.v) v = zero;
#else
    for (int h = 0; h < 2; h++) s.high[h] = s.low[h] = zero;
#endif
    s.begin = x;
  }
  return s;
}
inline Sums<8> operator+(Sums<8> a, const Sums<8>& b) {
  for (int h = 0; h < 2; h++) a.v[h] = vaddq_s32(a.v[h], b.v[h]);
  return a;
}
inline Sums<16> operator+(Sums<16> a, const Sums<16>& b) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  for (int i = 0; i < 4; i++) a.v[i] = vaddq_s32(a.v[i], b.v[i]);
#else
  for (int h = 0; h < 2; h++) a.high[h] = vaddq_s32(a.high[h], b.high[h]), a.low[h] = vaddq_s32(a.low[h], b.low[h]);
#endif
  a.begin += b.begin;
  return a;
}
inline Lanes to_lanes(const Sums<8>& s) { return {{vcvtq_f32_s32(s.v[0]), vcvtq_f32_s32(s.v[1])}}; }
inline Lanes to_lanes(const Sums<16>& s) {
  Lanes to;
  for (int h = 0; h < 2; h++) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    const int32x4_t high = vuzp1q_s32(s.v[2 * h], s.v[2 * h + 1]), low = vuzp2q_s32(s.v[2 * h], s.v[2 * h + 1]);
#else
    const int32x4_t high = s.high[h], low = s.low[h];
#endif
    const int32x4_t exact = vaddq_s32(vshlq_n_s32(high, RADIX_BITS), low);
    to.v[h] = vcvtq_f32_s32(vaddq_s32(exact, vdupq_n_s32(s.begin)));
  }
  return to;
}

// What is still to be taken from each code: a table's values have their sign.
template <BlockKind K, int BITS>
constexpr int OFFSET = format_of(K).table ? 0 : format_of(K).offset;

template <BlockKind K, int BITS>
inline __attribute__((always_inline)) Codes<BITS> widen(const uint8_t* unit, int j) {
  constexpr Format F = format_of(K);
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  uint8x16_t found[2][2];
  for (int h = 0; h < 2; h++) {
    if constexpr (WIDE == 8) {
      for (int e = 0; e < 2; e++) found[h][e] = vld1q_u8(unit + 32 * (2 * j + e) + 16 * h);
    } else if constexpr (WIDE == 4) {
      const uint8x16_t two = vld1q_u8(unit + 32 * j + 16 * h);
      found[h][0] = vandq_u8(two, vdupq_n_u8(15));
      found[h][1] = vshrq_n_u8(two, 4);
    } else {
      const uint8x16_t four = vld1q_u8(unit + 16 * (2 * h + j / 2));
      for (int e = 0; e < 2; e++)
        found[h][e] = vandq_u8(vshlq_u8(four, vdupq_n_s8(-2 * (j % 2 * 2 + e))), vdupq_n_u8(3));
    }
    if constexpr (NARROW > 0) {
      const uint8x16_t packed = vld1q_u8(unit + plane_bytes(WIDE) + (NARROW == 2 ? 16 * (2 * h + j / 2) : 16 * h));
      for (int e = 0; e < 2; e++) {
        const int at = NARROW == 2 ? 2 * (j % 2 * 2 + e) : 2 * j + e;
        const uint8x16_t part = vandq_u8(vshlq_u8(packed, vdupq_n_s8(-at)), vdupq_n_u8((1 << NARROW) - 1));
        found[h][e] = vorrq_u8(found[h][e], vshlq_n_u8(part, WIDE));
      }
    }
    if constexpr (F.table) {  // the values as they are, with their sign: a byte holds them so
      const uint8x16_t values = vsubq_u8(vld1q_u8(IQ4_VALUES), vdupq_n_u8(127));
      for (int e = 0; e < 2; e++) found[h][e] = vqtbl1q_u8(values, found[h][e]);
    }
  }
  Codes<BITS> codes;
  for (int h = 0; h < 2; h++) {
    for (int e = 0; e < 2; e++) codes.quads[h][e] = vreinterpretq_s8_u8(found[h][e]);
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (BITS == 16) {
      const uint32x4_t even = vreinterpretq_u32_u8(found[h][0]), odd = vreinterpretq_u32_u8(found[h][1]);
      codes.quads[h][0] = vreinterpretq_s8_u32(vzip1q_u32(even, odd));
      codes.quads[h][1] = vreinterpretq_s8_u32(vzip2q_u32(even, odd));
    }
#endif
  }
  return codes;
}

template <BlockKind K, int BITS>
inline __attribute__((always_inline)) Sums<BITS> dot(Sums<BITS> sum, const Codes<BITS>& codes, const int8_t* x) {
  if constexpr (BITS == 8) {
    const int8x8_t q = vld1_s8(x);
    for (int h = 0; h < 2; h++)
      sum.v[h] = vdotq_lane_s32(vdotq_lane_s32(sum.v[h], codes.quads[h][0], q, 0), codes.quads[h][1], q, 1);
  } else {
    const int8x16_t q = vld1q_s8(x);
#ifdef __ARM_FEATURE_MATMUL_INT8
    for (int i = 0; i < 4; i++) sum.v[i] = vmmlaq_s32(sum.v[i], codes.quads[i / 2][i % 2], q);
#else
    for (int h = 0; h < 2; h++) {
      sum.high[h] = vdotq_laneq_s32(vdotq_laneq_s32(sum.high[h], codes.quads[h][0], q, 0), codes.quads[h][1], q, 1);
      sum.low[h] = vdotq_laneq_s32(vdotq_laneq_s32(sum.low[h], codes.quads[h][0], q, 2), codes.quads[h][1], q, 3);
    }
#endif
  }
  return sum;
}

#else  // any CPU

struct Lanes {
  float v[OUTPUTS];
};
template <int BITS>
struct Codes {
  int16_t pairs[4][OUTPUTS][2];
};
template <int BITS>
struct Sums {
  int32_t v[OUTPUTS];
};

inline Lanes load_lanes(const float* p) {
  Lanes x;
  std::memcpy(x.v, p, sizeof(x.v));
  return x;
}
inline void store_lanes(float* p, Lanes x) { std::memcpy(p, x.v, sizeof(x.v)); }
template <typename F>
inline Lanes each_lane(const F& f) {
  Lanes x;
  for (int n = 0; n < OUTPUTS; n++) x.v[n] = f(n);
  return x;
}
inline Lanes lanes_of(float value) {
  return each_lane([&](int) { return value; });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return each_lane([&](int n) { return a.v[n] * b.v[n] + c.v[n]; });
}
inline Lanes times(Lanes a, Lanes b) {
  return each_lane([&](int n) { return a.v[n] * b.v[n]; });
}
inline Lanes halves(const uint8_t* p) {
  return each_lane([&](int n) { return float_of_half(half_at(p + 2 * n)); });
}
inline Lanes bytes(const uint8_t* p, bool is_signed, int shift, int mask) {
  return each_lane([&](int n) { return float(is_signed ? int8_t(p[n]) : p[n] >> shift & mask); });
}
template <int BITS>
inline Sums<BITS> begin_sums(int32_t x) {
  Sums<BITS> s;
  for (int n = 0; n < OUTPUTS; n++) s.v[n] = x;
  return s;
}
template <int BITS>
inline Sums<BITS> operator+(Sums<BITS> a, const Sums<BITS>& b) {
  for (int n = 0; n < OUTPUTS; n++) a.v[n] += b.v[n];
  return a;
}
template <int BITS>
inline Lanes to_lanes(const Sums<BITS>& s) {
  return each_lane([&](int n) { return float(s.v[n]); });
}

// What is still to be taken from each code.
template <BlockKind K, int BITS>
constexpr int OFFSET = format_of(K).offset;

template <BlockKind K, int BITS>
inline Codes<BITS> widen(const uint8_t* unit, int j) {
  constexpr Format F = format_of(K);
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  Codes<BITS> codes;
  for (int n = 0; n < OUTPUTS; n++)
    for (int r = 0; r < 8; r++) {
      const int i = 8 * j + r, at = place(WIDE, n, i);
      int code = unit[at / 8] >> at % 8 & ((1 << WIDE) - 1);
      if constexpr (NARROW > 0) {
        const int more = place(NARROW, n, i);
        code |= (unit[plane_bytes(WIDE) + more / 8] >> more % 8 & ((1 << NARROW) - 1)) << WIDE;
      }
      codes.pairs[r % 4][n][r / 4] = F.is_signed ? int8_t(code) : F.table ? IQ4_VALUES[code] : code;
    }
  return codes;
}

template <BlockKind K, int BITS>
inline Sums<BITS> dot(Sums<BITS> sum, const Codes<BITS>& codes, const int8_t* x) {
  const auto* q = reinterpret_cast<const Integer<BITS>*>(x);
  for (int i = 0; i < 4; i++)
    for (int n = 0; n < OUTPUTS; n++)
      sum.v[n] += codes.pairs[i][n][0] * q[2 * i] + codes.pairs[i][n][1] * q[2 * i + 1];
  return sum;
}

#endif

// Keeps the compiler from loading what comes later early, for which it would have to spill what is in use.
inline void keep_in_order() { asm volatile("" ::: "memory"); }

#ifndef MINIVLLM_BLOCKS_X86
template <BlockKind K, int BITS, int N>
inline __attribute__((always_inline)) void dot_tiles(Sums<BITS> (&sums)[N], const uint8_t* const (&units)[N], int j,
                                                     const int8_t* x) {
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) sums[n] = dot<K, BITS>(sums[n], widen<K, BITS>(units[n], j), x);
}

template <BlockKind K, int BITS, int T, int N>
inline __attribute__((always_inline)) void dots(Sums<BITS> (&sums)[T][N], const Codes<BITS>* const (&codes)[N],
                                                const int8_t* const (&x)[T]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) sums[t][n] = dot<K, BITS>(sums[t][n], *codes[n], x[t]);
}
#endif

// What is the same for all tokens of a group of a block.
struct Group {
  Lanes scale, minimum;
};

template <BlockKind K>
inline __attribute__((always_inline)) Group group_of(const uint8_t* block, int g) {
  typedef Tile<K> T;
  constexpr Format F = T::F;
  Group group;
  group.scale = halves(block);
  if constexpr (F.scales) {
    const uint8_t* at = block + T::SCALES_AT + g * OUTPUTS;
    group.scale = times(group.scale, bytes(at, !T::SHARED, 0, T::SHARED ? 15 : 255));
  }
  if constexpr (F.minima != 0) group.minimum = halves(block + 2 * OUTPUTS);
  if constexpr (F.minima == 2) {
    const uint8_t* at = block + T::MINIMA_AT + g * OUTPUTS;
    group.minimum = times(group.minimum, times(lanes_of(-1.f), bytes(at, false, T::SHARED ? 4 : 0, T::SHARED ? 15 : 255)));
  }
  return group;
}

}  // namespace minivllm
