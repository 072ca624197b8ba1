// Vectors of the machine's width out of the compilers' vector extensions (GCC and Clang: AVX-512, AVX2, NEON, SSE), and
// how 32-bit words of a KV page become float. No torch header: this compiles in seconds and has a plain C interface.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minivllm {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16, MAX_ROWS = 6;  // MAX_ROWS x 4 accumulators stay in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_ROWS = 6;  // 16 registers: MAX_ROWS x 2, or half of it x 4
#else
constexpr int LANES = 4, MAX_ROWS = 4;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

enum Kind : int { F32 = 0, F16 = 1, BF16 = 2, I8 = 3, E4M3 = 4 };
constexpr bool is_quantised(Kind kind) { return kind == I8 || kind == E4M3; }
constexpr int item_size(Kind kind) { return kind == F32 ? 4 : is_quantised(kind) ? 1 : 2; }

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
template <typename V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}
inline Floats splat(float x) { return x - Floats{}; }  // not x + 0: that would lose the sign of -0
inline Words splat_word(uint32_t x) { return x - Words{}; }
inline Floats as_floats(Words x) { return load<Floats>(&x); }
inline Words as_words(Floats x) { return load<Words>(&x); }

// Lane by lane: the low 16 bits as a float16. Also right for subnormals, infinities and NaN.
inline Floats from_float16(Words h) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256i twice = _mm256_packus_epi32((__m256i)h, (__m256i)h);  // lanes 0-3, 0-3, 4-7, 4-7
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0b1000)));
#else
  Words magnitude = (h & 0x7fffu) << 13;
  Words bits = as_words(as_floats(magnitude) * splat(0x1p112f));
  Words special = (Words)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return as_floats(bits | special | ((h & 0x8000u) << 16));
#endif
}

// e4m3, a byte a lane, as the float16 with the same bits of exponent and fraction: its exponent is biased by 8 more, so
// what comes out is 256 times too small. Their scales make up for it (attention.cpp: quantise).
inline Floats from_e4m3(Words code) { return from_float16((code & 0x7fu) << 7 | (code & 0x80u) << 8); }

// Element i of the item_size-wide elements packed in each word.
template <Kind K>
inline Floats unpack(Words word, int i) {
  if constexpr (K == F32) return as_floats(word);
  if constexpr (K == BF16) return as_floats(i == 0 ? word << 16 : word & 0xffff0000u);
  if constexpr (K == F16) return from_float16(i == 0 ? word & 0xffffu : word >> 16);
  if constexpr (K == E4M3) return from_e4m3(word >> (8 * i));
  return __builtin_convertvector((Ints)(word << (24 - 8 * i)) >> 24, Floats);
}

// LANES consecutive elements.
template <Kind K>
inline Floats load_floats(const void* from) {
  if constexpr (K == F32) return load<Floats>(from);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if constexpr (K == F16) return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
  if constexpr (K == BF16) return as_floats((Words)_mm512_cvtepu16_epi32(load<__m256i>(from)) << 16);
  if constexpr (K == I8) return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
  if constexpr (K == E4M3) return from_e4m3((Words)_mm512_cvtepu8_epi32(load<__m128i>(from)));
#else
#if defined(__AVX2__) && defined(__F16C__)
  if constexpr (K == F16) return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#endif
  if constexpr (K == F16) return from_float16(__builtin_convertvector(load<Halves>(from), Words));
  if constexpr (K == BF16) return as_floats(__builtin_convertvector(load<Halves>(from), Words) << 16);
  if constexpr (K == I8) return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
  if constexpr (K == E4M3) return from_e4m3((Words)__builtin_convertvector(load<Bytes>(from), Ints));
#endif
  __builtin_unreachable();
}

// The same where only `count` < LANES elements may be read; the rest is 0.
template <Kind K>
inline Floats load_some(const void* from, int count) {
  alignas(64) char padded[LANES * 4] = {};
  std::memcpy(padded, from, count * item_size(K));
  return load_floats<K>(padded);
}
inline Words load_some_words(const void* from, int count) {
  alignas(64) char padded[LANES * 4] = {};
  std::memcpy(padded, from, count * 4);
  return load<Words>(padded);
}

// acc + a pair of products a lane: both words hold two bfloat16.
inline Floats dot_bf16(Floats acc, Words a, Words b) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  return acc + unpack<BF16>(a, 0) * unpack<BF16>(b, 0) + unpack<BF16>(a, 1) * unpack<BF16>(b, 1);
#endif
}

// Round to nearest even; NaN stays NaN.
inline Halves to_bf16(Floats x) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  auto rounded = _mm512_cvtneps_pbh((__m512)x);
  return load<Halves>(&rounded);
#else
  Words bits = as_words(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(((Words)(x == x) & rounded) | ((Words)(x != x) & 0x7fc0u), Halves);
#endif
}

inline uint16_t to_float16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits = load<uint32_t>(&x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                        // subnormal: adding 1/2 leaves the bits that are wanted
    float shifted = std::fabs(x) + 0.5f;
    return sign | (load<uint32_t>(&shifted) - 0x3f000000u);
  }
  return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
#endif
}

inline Halves to_float16(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto rounded = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return load<Halves>(&rounded);
#elif defined(__AVX2__) && defined(__F16C__)
  const auto rounded = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  return load<Halves>(&rounded);
#else
  Halves rounded;
  for (int i = 0; i < LANES; i++) rounded[i] = to_float16(x[i]);
  return rounded;
#endif
}

inline float to_float(Kind kind, const char* from) {
  if (kind == F32) return load<float>(from);
  uint32_t h = load<uint16_t>(from);
  if (kind == BF16) {
    h <<= 16;
    return load<float>(&h);
  }
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  return from_float16(splat_word(h))[0];
#endif
}

// The larger one; b if either is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// 2^x for x <= 0, relative error below 2e-7; NaN stays NaN. Below 2^-126 it is 0 or, on AVX-512, subnormal.
inline Floats exp2_of_negative(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  // 2^(x - floor x), then one instruction multiplies by 2^(floor x) and minds the ends of the range. Of -inf the first
  // leaves 1, the second 0. The softmax takes as long as its products: each instruction counts.
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  Floats y = f * 0.00187757669f + 0.00898934063f;
  y = y * f + 0.0558263175f;
  y = y * f + 0.240153611f;
  y = y * f + 0.693153083f;
  y = y * f + 0.99999994f;
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
  const Ints tiny = x < -126.0f;
  x = tiny ? splat(-126.0f) : x;
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part is now in the low bits
  const Floats fraction = x - (shifted - 12582912.0f);
  Floats y = fraction * 1.54035304e-4f + 1.33335581e-3f;
  y = y * fraction + 9.61812911e-3f;
  y = y * fraction + 5.55041087e-2f;
  y = y * fraction + 2.40226507e-1f;
  y = y * fraction + 6.93147181e-1f;
  y = y * fraction + 1.0f;
  return tiny ? Floats{} : y * as_floats((as_words(shifted) << 23) + (127u << 23));
#endif
}

// 1 / x to the last bit or the one before it, for x from 2^-100 to 2^100; a division of whole vectors takes far longer.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// Of the lanes; halving, because a chain of LANES dependent operations would take longer than a chunk's products.
inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lane[LANES];
  store(lane, x);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) lane[i] += lane[i + n];
  return lane[0];
#endif
}
inline float max_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lane[LANES];
  store(lane, x);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) lane[i] = lane[i] < lane[i + n] ? lane[i + n] : lane[i];
  return lane[0];
#endif
}

// tanh by 1 - 2 / (e^2|x| + 1): never overflows.
inline Floats tanh_of(Floats x) {
  Floats magnitude = x < 0.0f ? -x : x;
  Floats e = exp2_of_negative(magnitude * -2.88539008f);  // e^(-2|x|)
  Floats y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// Vectors that so many rows meet at once.
template <int ROWS>
constexpr int WIDTH = LANES == 8 && ROWS > MAX_ROWS / 2 ? 2 : 4;

// Calls f.template operator()<n>(first row) for groups of n <= MAX_ROWS rows.
template <int N, typename F>
inline void last_rows(int count, int first, F&& f) {
  if constexpr (N > 0) {
    if (count == N)
      f.template operator()<N>(first);
    else
      last_rows<N - 1>(count, first, f);
  }
}
template <typename F>
inline void for_rows(int count, F&& f) {
  int m = 0;
  for (; count - m >= MAX_ROWS; m += MAX_ROWS) f.template operator()<MAX_ROWS>(m);
  last_rows<MAX_ROWS - 1>(count - m, m, f);
}

}  // namespace minivllm
