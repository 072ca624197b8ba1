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
// Inputs are integers: x = scale * q, |q| <= 127 * 128, one scale for 32 inputs, so that an input errs by at most 2^-15
// of the largest beside it. Products of a group are summed exactly in int32, whatever the CPU:
//   x86   q as int16, codes widened to int16: vpmaddwd and an addition, or one vpdpwssd (AVX-VNNI, AVX-512 VNNI). Bytes
//         (vpmaddubsw, vpdpbusd) take q in two halves, so two of them do the work of one of these, and need signs minded.
//   ARM   q as two bytes, 128 * high + low: sdot, or smmla (i8mm), whose two columns are the high and the low bytes.
//   else  plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

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

constexpr int RADIX_BITS = 7;           // of q's two bytes
constexpr float LARGEST_Q = 127 * 128;  // what the largest of a unit's inputs becomes

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
#else  // as the words of plane 4, so that a shift brings them beside those
  const int word = r / 4;
  if (plane == 2) return j / 2 * 256 + n * 32 + word * 16 + 2 * (j % 2 * 4 + r % 4);
  return n * 32 + word * 16 + 4 * j + r % 4;
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
        constexpr int HALF = 4 * PLANE;  // bits of four codes
        const int at = PLANE == 2 ? j % 2 : j;
        words[PLANE == 2 ? j / 2 : 0] |= (bits & ((1u << HALF) - 1)) << HALF * at | bits >> HALF << (16 + HALF * at);
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

// A unit's inputs as integers, see minivllm_integers; q in the order that this CPU's products want.
struct UnitOfX {
  int8_t* q;
  float* scales;
  int32_t* sums;
};

inline void arrange(const int32_t* q, int8_t* to) {
#ifdef MINIVLLM_BLOCKS_ARM  // 8 inputs after another: their high bytes, then the low ones; even inputs first
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < 8; r++) {
      const int32_t value = q[8 * j + r], high = (value + (1 << (RADIX_BITS - 1))) >> RADIX_BITS;
      int8_t* at = to + 16 * j + 4 * (r % 2) + r / 2;
      at[0] = int8_t(high);
      at[8] = int8_t(value - high * (1 << RADIX_BITS));
    }
#else  // inputs i and i + 4 of 8 side by side, as the words of plane 4 hold them
  int16_t* words = reinterpret_cast<int16_t*>(to);
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < 8; r++) words[8 * j + 2 * (r % 4) + r / 4] = int16_t(q[8 * j + r]);
#endif
}

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
  const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : some ? most / LARGEST_Q : 0.f;
  const float inverse = some ? LARGEST_Q / most : 0.f;
#ifdef MINIVLLM_BLOCKS_X86
  __m256i q[4];
  const __m256 times = _mm256_set1_ps(inverse);
  for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], times));
  if (!some) q[0] = q[1] = q[2] = q[3] = _mm256_setzero_si256();
  const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                         0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  for (int i = 0; i < 2; i++) {
    const __m256i mixed = _mm256_packs_epi32(q[2 * i], q[2 * i + 1]);  // quarters 0, 2, 1, 3
    const __m256i words = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(mixed, 0xd8), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.q + 32 * i), words);
    const __m256i pairs = _mm256_add_epi32(q[2 * i], q[2 * i + 1]);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    to.sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }
#else
  int32_t q[UNIT];
  for (int i = 0; i < UNIT; i++) q[i] = some ? int32_t(std::nearbyint(x[i] * inverse)) : 0;
  arrange(q, to.q);
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
struct Codes {
  __m256i pairs[4];  // inputs (i, i + 4) of each output
};
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

inline Sums begin_sums(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline Sums operator+(Sums a, Sums b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Lanes to_lanes(Sums s) { return _mm256_cvtepi32_ps(s.v); }

inline __m256i dot_words(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  asm("" : "+x"(sum));  // else GCC adds products in another order, for which it has too few registers
  return sum;
#endif
}

inline __m256i shifted_left(__m256i x, int bits) { return bits > 0 ? _mm256_slli_epi16(x, bits) : _mm256_srli_epi16(x, -bits); }

// Pair i of block j of 8 inputs of a unit.
template <BlockKind K>
inline __attribute__((always_inline)) __m256i widen_pair(const uint8_t* unit, int j, int i) {
  constexpr Format F = format_of(K);
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  auto load = [](const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  if constexpr (WIDE == 8) {
    const __m256i four = load(unit + 32 * (2 * j + i % 2));
    return _mm256_srai_epi16(i < 2 ? _mm256_slli_epi16(four, 8) : four, 8);
  }
  const int at = WIDE == 4 ? 4 * i : 2 * (j % 2 * 4 + i);  // of the code in its word
  __m256i pair = shifted_left(load(unit + 32 * (WIDE == 4 ? j : j / 2)), -at);
  if (at + WIDE < 16) pair = _mm256_and_si256(pair, _mm256_set1_epi16((1 << WIDE) - 1));
  if constexpr (NARROW > 0) {
    const __m256i packed = load(unit + plane_bytes(WIDE) + (NARROW == 2 ? 32 * (j / 2) : 0));
    const __m256i mask = _mm256_set1_epi16(((1 << NARROW) - 1) << WIDE);
    const int more = NARROW == 2 ? 2 * (j % 2 * 4 + i) : 4 * j + i;
    pair = _mm256_or_si256(pair, _mm256_and_si256(shifted_left(packed, WIDE - more), mask));
  }
  if constexpr (F.table) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(IQ4_VALUES)));
    pair = _mm256_shuffle_epi8(values, pair);  // values[0] is 0
  }
  return pair;
}

// Block j of 8 inputs of a unit.
template <BlockKind K>
inline __attribute__((always_inline)) Codes widen(const uint8_t* unit, int j) {
  Codes codes;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) codes.pairs[i] = widen_pair<K>(unit, j, i);
  return codes;
}

inline __m256i spread_pair(const int8_t* x, int i) {
  int32_t pair;
  std::memcpy(&pair, x + 4 * i, 4);
  return _mm256_set1_epi32(pair);
}

// Sums of a block of 8 inputs, for one token; x: block j's part of q.
inline __attribute__((always_inline)) Sums dot(Sums sum, const Codes& codes, const int8_t* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) sum.v = dot_words(sum.v, codes.pairs[i], spread_pair(x, i));
  return sum;
}

// The same with N tiles: each pair of inputs is spread once for all of them.
template <BlockKind K, int N>
inline __attribute__((always_inline)) void dot_tiles(Sums (&sums)[N], const uint8_t* const (&units)[N], int j,
                                                     const int8_t* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256i spread = spread_pair(x, i);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n].v = dot_words(sums[n].v, widen_pair<K>(units[n], j, i), spread);
  }
}

// The same for T tokens and N tiles: each pair of inputs is spread once for all tiles, each pair of codes loaded once for
// all tokens.
template <int T, int N>
inline __attribute__((always_inline)) void dots(Sums (&sums)[T][N], const Codes* const (&codes)[N],
                                                const int8_t* const (&x)[T]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256i w[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) w[n] = codes[n]->pairs[i];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const __m256i spread = spread_pair(x[t], i);
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) sums[t][n].v = dot_words(sums[t][n].v, w[n], spread);
    }
  }
}

inline void ask_for(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

#elif defined(MINIVLLM_BLOCKS_ARM)

struct Lanes {
  float32x4_t v[2];
};
struct Codes {
  int8x16_t quads[2][2];  // [outputs 0-3, 4-7][inputs 0, 2, 4, 6; 1, 3, 5, 7] or, with i8mm, [..][2 outputs x 8 inputs]
};
struct Sums {
#ifdef __ARM_FEATURE_MATMUL_INT8
  int32x4_t v[4];  // of two outputs: high, low, high, low
#else
  int32x4_t high[2], low[2];
#endif
  int32_t begin;
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

inline Sums begin_sums(int32_t x) {
  Sums s;
  const int32x4_t zero = vdupq_n_s32(0);
#ifdef __ARM_FEATURE_MATMUL_INT8
  for (auto& v : s.v) v = zero;
#else
  for (int h = 0; h < 2; h++) s.high[h] = s.low[h] = zero;
#endif
  s.begin = x;
  return s;
}
inline Sums operator+(Sums a, const Sums& b) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  for (int i = 0; i < 4; i++) a.v[i] = vaddq_s32(a.v[i], b.v[i]);
#else
  for (int h = 0; h < 2; h++) a.high[h] = vaddq_s32(a.high[h], b.high[h]), a.low[h] = vaddq_s32(a.low[h], b.low[h]);
#endif
  a.begin += b.begin;
  return a;
}
inline Lanes to_lanes(const Sums& s) {
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

template <BlockKind K>
inline __attribute__((always_inline)) Codes widen(const uint8_t* unit, int j) {
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
  Codes codes;
  for (int h = 0; h < 2; h++) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    const uint32x4_t even = vreinterpretq_u32_u8(found[h][0]), odd = vreinterpretq_u32_u8(found[h][1]);
    codes.quads[h][0] = vreinterpretq_s8_u32(vzip1q_u32(even, odd));
    codes.quads[h][1] = vreinterpretq_s8_u32(vzip2q_u32(even, odd));
#else
    for (int e = 0; e < 2; e++) codes.quads[h][e] = vreinterpretq_s8_u8(found[h][e]);
#endif
  }
  return codes;
}

inline __attribute__((always_inline)) Sums dot(Sums sum, const Codes& codes, const int8_t* x) {
  const int8x16_t q = vld1q_s8(x);
#ifdef __ARM_FEATURE_MATMUL_INT8
  for (int i = 0; i < 4; i++) sum.v[i] = vmmlaq_s32(sum.v[i], codes.quads[i / 2][i % 2], q);
#else
  for (int h = 0; h < 2; h++) {
    sum.high[h] = vdotq_laneq_s32(vdotq_laneq_s32(sum.high[h], codes.quads[h][0], q, 0), codes.quads[h][1], q, 1);
    sum.low[h] = vdotq_laneq_s32(vdotq_laneq_s32(sum.low[h], codes.quads[h][0], q, 2), codes.quads[h][1], q, 3);
  }
#endif
  return sum;
}

inline void ask_for(const uint8_t* p) { __builtin_prefetch(p); }

#else  // any CPU

struct Lanes {
  float v[OUTPUTS];
};
struct Codes {
  int16_t pairs[4][OUTPUTS][2];
};
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
inline Sums begin_sums(int32_t x) {
  Sums s;
  for (int n = 0; n < OUTPUTS; n++) s.v[n] = x;
  return s;
}
inline Sums operator+(Sums a, const Sums& b) {
  for (int n = 0; n < OUTPUTS; n++) a.v[n] += b.v[n];
  return a;
}
inline Lanes to_lanes(const Sums& s) {
  return each_lane([&](int n) { return float(s.v[n]); });
}

template <BlockKind K>
inline Codes widen(const uint8_t* unit, int j) {
  constexpr Format F = format_of(K);
  constexpr int WIDE = wide_plane(F.bits), NARROW = narrow_plane(F.bits);
  Codes codes;
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

inline Sums dot(Sums sum, const Codes& codes, const int8_t* x) {
  const int16_t* words = reinterpret_cast<const int16_t*>(x);
  for (int i = 0; i < 4; i++)
    for (int n = 0; n < OUTPUTS; n++)
      sum.v[n] += codes.pairs[i][n][0] * words[2 * i] + codes.pairs[i][n][1] * words[2 * i + 1];
  return sum;
}

inline void ask_for(const uint8_t*) {}

#endif

// Keeps the compiler from loading what comes later early, for which it would have to spill what is in use.
inline void keep_in_order() { asm volatile("" ::: "memory"); }

#ifndef MINIVLLM_BLOCKS_X86
template <BlockKind K, int N>
inline __attribute__((always_inline)) void dot_tiles(Sums (&sums)[N], const uint8_t* const (&units)[N], int j,
                                                     const int8_t* x) {
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) sums[n] = dot(sums[n], widen<K>(units[n], j), x);
}

template <int T, int N>
inline __attribute__((always_inline)) void dots(Sums (&sums)[T][N], const Codes* const (&codes)[N],
                                                const int8_t* const (&x)[T]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) sums[t][n] = dot(sums[t][n], *codes[n], x[t]);
}
#endif

// What is still to be taken from each code: a group's sums begin with so many times the inputs' sum, and it takes no
// instruction of its own.
template <BlockKind K>
#ifdef MINIVLLM_BLOCKS_ARM  // a table's values have their sign there
constexpr int OFFSET = format_of(K).table ? 0 : format_of(K).offset;
#else
constexpr int OFFSET = format_of(K).offset;
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
