// y = x W^T with W kept as 4- or 8-bit codes in groups of 32 along the inputs: w = scale * code + minimum.
//
// Layout (`pack`): the matrix is cut into blocks of 16 outputs x 32 inputs, stored one after another, inputs fastest. A
// block is what one step of the inner loop reads, and nothing else is read: codes, 16 fp16 scales, 16 fp16 minima.
//   8 bits: the code of (output n, input k) is byte k / 4 * 64 + 4 n + k % 4, so that 64 bytes are one operand of
//           vpdpbusd. Codes are signed and stored with an offset of 128, as that instruction wants; there are no minima
//           (the offset makes one: -128 * scale). 512 + 32 bytes.
//   4 bits: the same bytes with inputs 0-15 in the low nibbles and 16-31 in the high ones. Codes 0..15. 256 + 64 bytes.
//
// Two paths with one meaning. In both an output's sum is the same, bit for bit, whatever the number of tokens.
//   portable  fp32 activations, in loops that the compiler vectorises for whatever CPU it compiles for.
//   vnni      AVX-512 VNNI: a group of activations becomes integers of two bytes (radix * high + low) with one scale, the
//             products of a group are summed exactly in int32, and only whole groups are scaled and added in fp32. With
//             8-bit codes the radix is 128: an integer errs by at most 2^-15 of the group's largest. With 4-bit codes
//             it is 16, so that 16 * code is still a byte (see amx): 2^-12, an eighth of what bf16 errs for the largest.
//             From kAmxTokens tokens on the integer products run on the matrix unit (AMX), where there is one. 4 bits:
//             high bytes meet 16 * code and low bytes code, so that one instruction sums both. Integers have no
//             rounding: the sums are the very same.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAVE_VNNI 1
#include <immintrin.h>

#include "ahead.h"
#include "amx_permission.h"
#if defined(MINIVLLM_AMX) && defined(__AMX_INT8__)
#define HAVE_AMX 1
#endif
#endif

namespace {

constexpr int64_t N = 16;            // outputs of a block
constexpr int64_t K = 32;            // inputs of a block, and of a group
constexpr int shift_of(int bits) { return bits == 4 ? 4 : 7; }                     // log2 of the radix
constexpr float largest_of(int bits) { return bits == 4 ? 127 * 16 + 7 : 127 * 128; }  // that a group's largest becomes
constexpr float kOffset = 128;       // of stored 8-bit codes
constexpr int64_t kAhead = 2560;     // bytes of weight asked for before they are needed
constexpr int64_t kAmxTokens = 8;    // fewer would waste most of a tile
constexpr int64_t kRows = 16;        // tokens of a tile
constexpr int64_t codes_bytes(int bits) { return N * K * bits / 8; }
constexpr int64_t block_bytes(int bits) { return codes_bytes(bits) + (bits == 4 ? 4 : 2) * N; }

enum Path : int64_t { kPortable = 0, kVnni = 1 };

// What all blocks of a call share.
struct Inputs {
  const float* x;              // portable: [tokens, inputs]
  const int8_t* fixed;         // vnni: [tokens, groups, high and low, 32]
  const float* scales;         // vnni: [tokens, groups]
  const float* sums;           // of each group of inputs, which multiply the minima: [tokens, groups]
  bool amx;
  int64_t tokens, groups;
  const uint8_t* weight;
};

struct Outputs {
  void* y;  // [tokens, outputs]
  const float* bias;
  int64_t outputs;
  bool bf16;
};

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  const uint32_t magnitude = h & 0x7fff;
  uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    bits |= 0x7f800000;
    std::memcpy(&value, &bits, 4);
  } else {  // 2^112 moves the exponent, and makes subnormals normal
    std::memcpy(&value, &bits, 4);
    value *= 5192296858534827628530496329220096.f;
  }
  return h & 0x8000 ? -value : value;
}

inline void write(const Outputs& out, int64_t token, int64_t first, float* values) {
  const int64_t count = std::min(N, out.outputs - first), at = token * out.outputs + first;
  if (out.bias)
    for (int64_t n = 0; n < count; n++) values[n] += out.bias[first + n];
#if defined(__AVX512BF16__)
  if (out.bf16 && count == N) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(values));
    std::memcpy(static_cast<uint16_t*>(out.y) + at, &rounded, sizeof(rounded));
    return;
  }
#endif
  if (!out.bf16) {
    std::memcpy(static_cast<float*>(out.y) + at, values, 4 * count);
    return;
  }
  uint16_t rounded[N];
  for (int64_t n = 0; n < N; n++) rounded[n] = to_bf16(values[n]);
  std::memcpy(static_cast<uint16_t*>(out.y) + at, rounded, 2 * count);
}

// ------------------------------------------------------------------------------------------------------- portable

// Codes as fp32 in the order in which they are stored: [8 vectors, 16 outputs, 4 inputs].
template <int bits>
void expand_portable(const uint8_t* block, float* w) {
  if (bits == 8) {
    for (int64_t i = 0; i < N * K; i++) w[i] = static_cast<float>(block[i]) - kOffset;
  } else {
    for (int64_t i = 0; i < N * K / 2; i++) w[i] = static_cast<float>(block[i] & 15);
    for (int64_t i = 0; i < N * K / 2; i++) w[N * K / 2 + i] = static_cast<float>(block[i] >> 4);
  }
}

template <int bits>
void block_portable(const Inputs& in, int64_t b, float* sums) {  // sums: [tokens, 16], zeroed
  alignas(64) float w[N * K];
  float scale[N], minimum[N];
  for (int64_t g = 0; g < in.groups; g++) {
    const uint8_t* block = in.weight + (b * in.groups + g) * block_bytes(bits);
    expand_portable<bits>(block, w);
    for (int64_t n = 0; n < N; n++) {
      scale[n] = from_half(block + codes_bytes(bits) + 2 * n);
      minimum[n] = bits == 4 ? from_half(block + codes_bytes(bits) + 2 * (N + n)) : 0.f;
    }
    for (int64_t t = 0; t < in.tokens; t++) {
      const float* x = in.x + (t * in.groups + g) * K;
      alignas(64) float lanes[4 * N] = {};  // four partial sums an output, one for each input of a vector
      for (int64_t v = 0; v < K / 4; v++) {
        float four[16];
        for (int i = 0; i < 16; i++) four[i] = x[4 * v + i % 4];
        for (int64_t i = 0; i < 4 * N; i += 16)
          for (int j = 0; j < 16; j++) lanes[i + j] += w[64 * v + i + j] * four[j];
      }
      const float sum = in.sums[t * in.groups + g];
      for (int64_t n = 0; n < N; n++) {
        const float group = (lanes[4 * n] + lanes[4 * n + 1]) + (lanes[4 * n + 2] + lanes[4 * n + 3]);
        sums[t * N + n] += scale[n] * group + minimum[n] * sum;
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- vnni

#ifdef HAVE_VNNI
inline __m512 halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// One group of inputs as integers, q = radix * high + low, times a scale. to: [high and low][32].
template <int bits, typename T>
void to_fixed_point(const T* x, int8_t* to, float* scale, float* sum) {
  const __m512 v[2] = {load16(x), load16(x + 16)};
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1])));
  const bool finite = largest < std::numeric_limits<float>::infinity() &&
                      !_mm512_cmp_ps_mask(v[0], v[0], _CMP_UNORD_Q) && !_mm512_cmp_ps_mask(v[1], v[1], _CMP_UNORD_Q);
  *scale = finite ? largest / largest_of(bits) : std::numeric_limits<float>::quiet_NaN();  // NaN must not become a number
  const __m512 inverse = _mm512_set1_ps(largest > 0.f ? largest_of(bits) / largest : 0.f);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < 2; i++) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    constexpr int shift = shift_of(bits);
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(1 << (shift - 1))), shift);
    const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, shift));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i), _mm512_cvtepi32_epi8(h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + K + 16 * i), _mm512_cvtepi32_epi8(l));
    total = _mm512_add_epi32(total, q);
  }
  *sum = *scale * static_cast<float>(_mm512_reduce_add_epi32(total));
}

// The 8 vectors of a block, bytes without sign: four inputs each of 16 outputs.
template <int bits>
inline __attribute__((always_inline)) void expand(const uint8_t* block, __m512i w[8]) {
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++) {
    if (bits == 8) {
      w[v] = _mm512_loadu_si512(block + 64 * v);
    } else {
      const __m512i bytes = _mm512_loadu_si512(block + 64 * (v % 4));
      w[v] = _mm512_and_si512(v < 4 ? bytes : _mm512_srli_epi16(bytes, 4), nibble);
    }
  }
}

inline __m512i dot(__m512i sum, __m512i w, const int8_t* x, int v) {
  int32_t four;
  std::memcpy(&four, x + 4 * v, 4);
  return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}

// What of a group's products is the same for all tokens.
struct Group {
  __m512 scale, minimum;
};

template <int bits>
inline Group group_of(const uint8_t* block) {
  const __m512 scale = halves(block + codes_bytes(bits));
  return {scale, bits == 4 ? halves(block + codes_bytes(bits) + 2 * N) : _mm512_mul_ps(scale, _mm512_set1_ps(-kOffset))};
}

// A token's sum and one group more.
inline __attribute__((always_inline)) __m512 plus(__m512 sum, __m512i exact, float scale_of_x, float sum_of_x,
                                                  const Group& group) {
  const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(scale_of_x));
  return _mm512_fmadd_ps(_mm512_set1_ps(sum_of_x), group.minimum, _mm512_fmadd_ps(product, group.scale, sum));
}

template <int bits, int count>
inline __attribute__((always_inline)) void tokens_vnni(
    const Inputs& in, int64_t t, int64_t g, const __m512i* w, const Group& group, float* sums) {
  __m512i high[count], low[count];
  int64_t at[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    high[i] = low[i] = _mm512_setzero_si512();
    at[i] = (t + i) * in.groups + g;
  }
#pragma GCC unroll 8
  for (int v = 0; v < 8; v++)
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      high[i] = dot(high[i], w[v], in.fixed + at[i] * 2 * K, v);
      low[i] = dot(low[i], w[v], in.fixed + at[i] * 2 * K + K, v);
    }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    float* to = sums + (t + i) * N;
    const __m512i exact = _mm512_add_epi32(_mm512_slli_epi32(high[i], shift_of(bits)), low[i]);
    _mm512_storeu_ps(to, plus(_mm512_loadu_ps(to), exact, in.scales[at[i]], in.sums[at[i]], group));
  }
}

// Into the first-level cache where Zen 4 was measured, which gains by that whatever it reads ahead by itself.
inline void ask_ahead(const uint8_t* block, int64_t bytes) {
  using namespace minivllm;
  ask_for<READS_AHEAD ? FIRST_LEVEL : SECOND_LEVEL>(block + kAhead, bytes);
}

template <int bits>
void block_vnni(const Inputs& in, int64_t b, float* sums) {
  const uint8_t* block = in.weight + b * in.groups * block_bytes(bits);
  for (int64_t g = 0; g < in.groups; g++, block += block_bytes(bits)) {
    ask_ahead(block, block_bytes(bits));
    __m512i w[8];
    expand<bits>(block, w);
    const Group group = group_of<bits>(block);
    int64_t t = 0;
    for (; t + 8 <= in.tokens; t += 8) tokens_vnni<bits, 8>(in, t, g, w, group, sums);
    if (in.tokens - t >= 4) tokens_vnni<bits, 4>(in, t, g, w, group, sums), t += 4;
    if (in.tokens - t >= 2) tokens_vnni<bits, 2>(in, t, g, w, group, sums), t += 2;
    if (in.tokens - t >= 1) tokens_vnni<bits, 1>(in, t, g, w, group, sums);
  }
}
#endif

// ------------------------------------------------------------------------------------------------------------ amx

#ifdef HAVE_AMX
// Left operands are rows of `fixed`, [tokens][inputs]: 4 bits take high and low bytes at once (64 of a group), 8 bits one
// after the other. Right ones are codes as they lie in a block, [vectors][16 outputs x 4 inputs]: of 4 bits 16 * code,
// then code. Tiles 0-3 are sums, [tokens][16 outputs], 4 and 5 left operands, 6 the right one.
template <int bits>
void configure_tiles(int64_t tokens) {
  minivllm::TileConfig config;
  for (int i = 0; i < 7; i++) {
    config.row_bytes[i] = bits == 8 && (i == 4 || i == 5) ? K : 64;
    config.rows[i] = i == 6 ? (bits == 4 ? 16 : 8) : std::min(kRows, tokens);
  }
  config.load();
}

// Groups go through three loops a few at a time: what is stored must have reached the cache before the matrix unit, or
// the vector unit after it, loads it.
constexpr int64_t kGroups = 4;
constexpr int64_t kTile = kRows * N;

// The products of kRows tokens from `x` on with the codes in tile 6. A tile's number must be a literal.
#define MINIVLLM_TILE(sum, left, x, to)     \
  _tile_zero(sum);                          \
  _tile_loadd(left, x, in.groups * 2 * K);  \
  _tile_dpbsud(sum, left, 6);               \
  _tile_stored(sum, to, 64)

// to: [2 kRows][16 outputs], of 8 bits twice: high, low.
template <int bits>
inline void tiles_of(const Inputs& in, int64_t t, int64_t g, const uint8_t* codes, bool two, int32_t* to) {
  const int8_t *x = in.fixed + (t * in.groups + g) * 2 * K, *next = x + kRows * in.groups * 2 * K;
  _tile_loadd(6, codes, 64);
  MINIVLLM_TILE(0, 4, x, to);
  if (two) {
    MINIVLLM_TILE(1, 5, next, to + kTile);
  }
  if (bits == 8) {
    MINIVLLM_TILE(2, 4, x + K, to + 2 * kTile);
    if (two) {
      MINIVLLM_TILE(3, 5, next + K, to + 3 * kTile);
    }
  }
}
#undef MINIVLLM_TILE

// sums += `count` groups, from `first` on, of one token.
template <int bits, int count>
inline __attribute__((always_inline)) void add_groups(const Inputs& in, int64_t at, const int32_t* from,
                                                      const Group* groups, float* sums) {
  __m512 sum = _mm512_loadu_ps(sums);
#pragma GCC unroll 4
  for (int g = 0; g < count; g++, from += 4 * kTile) {
    __m512i exact = _mm512_load_si512(from);
    if (bits == 8)
      exact = _mm512_add_epi32(_mm512_slli_epi32(exact, shift_of(bits)), _mm512_load_si512(from + 2 * kTile));
    sum = plus(sum, exact, in.scales[at + g], in.sums[at + g], groups[g]);
  }
  _mm512_storeu_ps(sums, sum);
}

template <int bits>
void block_amx(const Inputs& in, int64_t b, float* sums) {
  alignas(64) int32_t products[kGroups][4 * kTile];
  alignas(64) uint8_t codes[kGroups][2 * N * K];
  Group groups[kGroups];
  for (int64_t first = 0; first < in.groups; first += kGroups) {
    const int64_t count = std::min(kGroups, in.groups - first);
    const uint8_t* blocks = in.weight + (b * in.groups + first) * block_bytes(bits);
    for (int64_t g = 0; g < count; g++) {
      const uint8_t* block = blocks + g * block_bytes(bits);
      ask_ahead(block, block_bytes(bits));
      groups[g] = group_of<bits>(block);
      if (bits == 8) continue;  // as they lie
      __m512i w[8];
      expand<bits>(block, w);
      for (int v = 0; v < 8; v++) {
        _mm512_store_si512(codes[g] + 64 * v, _mm512_slli_epi16(w[v], 4));
        _mm512_store_si512(codes[g] + 64 * (8 + v), w[v]);
      }
    }
    for (int64_t t = 0; t < in.tokens; t += 2 * kRows) {
      const int64_t tokens = std::min(2 * kRows, in.tokens - t);
      asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read memory
      for (int64_t g = 0; g < count; g++)
        tiles_of<bits>(in, t, g + first, bits == 4 ? codes[g] : blocks + g * block_bytes(bits), tokens > kRows, products[g]);
      asm volatile("" ::: "memory");
      for (int64_t i = 0; i < tokens; i++) {
        const int64_t at = (t + i) * in.groups + first;
        const int32_t* from = products[0] + i * N;
        float* to = sums + (t + i) * N;
        switch (count) {
          case 1: add_groups<bits, 1>(in, at, from, groups, to); break;
          case 2: add_groups<bits, 2>(in, at, from, groups, to); break;
          case 3: add_groups<bits, 3>(in, at, from, groups, to); break;
          default: add_groups<bits, 4>(in, at, from, groups, to);
        }
      }
    }
  }
}
#endif

// ------------------------------------------------------------------------------------------------------- the calls

// A call's activations in the form that its path wants; the calling thread keeps the memory.
struct Prepared {
  std::vector<float> x, scales, sums;
  std::vector<int8_t> fixed;
};

struct Call {
  Inputs in;
  Outputs out;
  Prepared* prepared;
  const void* x;
  int64_t path, bits, blocks, share;
  bool x_bf16;
  std::atomic<int64_t> next{0};

  // Takes shares of `count` items until none is left: a thread whose core is wanted elsewhere then takes fewer.
  template <typename Work>
  void each(int64_t count, Work work) {
    for (;;) {
      const int64_t begin = next.fetch_add(share, std::memory_order_relaxed);
      if (begin >= count) return;
      for (int64_t i = begin; i < std::min(count, begin + share); i++) work(i);
    }
  }
};

void prepare_group(Call& call, int64_t i) {
  Prepared& p = *call.prepared;
#ifdef HAVE_VNNI
  if (call.path == kVnni) {
    auto convert = [&](auto* x) {
      auto to_fixed = call.bits == 4 ? to_fixed_point<4, std::remove_cvref_t<decltype(*x)>>
                                     : to_fixed_point<8, std::remove_cvref_t<decltype(*x)>>;
      to_fixed(x + i * K, &p.fixed[i * 2 * K], &p.scales[i], &p.sums[i]);
    };
    call.x_bf16 ? convert(static_cast<const uint16_t*>(call.x)) : convert(static_cast<const float*>(call.x));
    return;
  }
#endif
  float* to = &p.x[i * K];
  if (call.x_bf16)
    for (int64_t k = 0; k < K; k++) to[k] = from_bf16(static_cast<const uint16_t*>(call.x)[i * K + k]);
  else std::memcpy(to, static_cast<const float*>(call.x) + i * K, 4 * K);
  float sum = 0.f;
  for (int64_t k = 0; k < K; k++) sum += to[k];
  p.sums[i] = sum;
}

// The matrix as bf16 [outputs, inputs], each weight rounded once.
struct Unpacking {
  const uint8_t* weight;
  uint16_t* to;
  int64_t outputs, groups, bits, blocks;
  std::atomic<int64_t> next{0};
};

template <int bits>
void unpack_block(const Unpacking& u, int64_t b) {
  alignas(64) float w[N * K];
  for (int64_t g = 0; g < u.groups; g++) {
    const uint8_t* block = u.weight + (b * u.groups + g) * block_bytes(bits);
    expand_portable<bits>(block, w);
    for (int64_t n = 0; n < std::min(N, u.outputs - b * N); n++) {
      const float scale = from_half(block + codes_bytes(bits) + 2 * n);
      const float minimum = bits == 4 ? from_half(block + codes_bytes(bits) + 2 * (N + n)) : 0.f;
      uint16_t* row = u.to + ((b * N + n) * u.groups + g) * K;
      for (int64_t v = 0; v < K / 4; v++)
        for (int64_t i = 0; i < 4; i++) row[4 * v + i] = to_bf16(scale * w[64 * v + 4 * n + i] + minimum);
    }
  }
}

void unpack(void* data) {
  Unpacking& u = *static_cast<Unpacking*>(data);
  for (int64_t b; (b = u.next.fetch_add(1, std::memory_order_relaxed)) < u.blocks;)
    u.bits == 4 ? unpack_block<4>(u, b) : unpack_block<8>(u, b);
}

// -8 h in fp16, which is exact but where it is infinite. Of a subnormal h, the product may be an ordinary number.
inline uint16_t times_minus_8(uint16_t h) {
  const uint16_t sign = ~h & 0x8000, size = h & 0x7fff;
  if (size >= 0x0400) return sign | (size >= 0x7c00 ? size : std::min(size + 3 * 0x0400, 0x7c00));
  uint32_t mantissa = size << 3, exponent = 0;
  for (; mantissa >= 0x0800; mantissa >>= 1) exponent += 0x0400;  // its leading bit is the exponent's first step
  return sign | (exponent + mantissa);
}

struct Packing {
  const uint8_t* rows;
  uint8_t* to;
  int64_t first, count, groups, bits, halves;
  std::atomic<int64_t> next;
  std::atomic<bool> finite{true};
};

// Of a block of the matrix, the outputs that `rows` has.
template <int bits>
bool pack_block(const Packing& p, int64_t b) {
  constexpr int64_t code_bytes = K * bits / 8;
  const int64_t begin = std::max(p.first, b * N), end = std::min(p.first + p.count, b * N + N);
  bool finite = true;
  for (int64_t g = 0; g < p.groups; g++) {
    uint8_t* block = p.to + (b * p.groups + g) * block_bytes(bits);
    for (int64_t row = begin; row < end; row++) {
      const int64_t n = row - b * N;
      const uint8_t* from = p.rows + ((row - p.first) * p.groups + g) * (2 * p.halves + code_bytes);
      const uint8_t* code = from + 2 * p.halves;
      for (int64_t i = 0; i < code_bytes; i += 4) std::memcpy(block + i / 4 * 64 + 4 * n, code + i, 4);
      if constexpr (bits == 8)  // signed + 128
        for (int64_t k = 0; k < K; k++) block[k / 4 * 64 + 4 * n + k % 4] ^= 0x80;
      uint16_t scale, minimum;
      std::memcpy(&scale, from, 2);
      std::memcpy(block + codes_bytes(bits) + 2 * n, &scale, 2);
      if constexpr (bits == 4) {
        if (p.halves == 1) minimum = times_minus_8(scale);
        else std::memcpy(&minimum, from + 2, 2);
        std::memcpy(block + codes_bytes(bits) + 2 * (N + n), &minimum, 2);
        finite &= (minimum & 0x7c00) != 0x7c00;
      }
    }
  }
  return finite;
}

void pack(void* data) {
  Packing& p = *static_cast<Packing*>(data);
  for (int64_t b; (b = p.next.fetch_add(1, std::memory_order_relaxed)) * N < p.first + p.count;)
    if (!(p.bits == 4 ? pack_block<4>(p, b) : pack_block<8>(p, b))) p.finite.store(false, std::memory_order_relaxed);
}

void prepare(void* data) {
  Call& call = *static_cast<Call*>(data);
  call.each(call.in.tokens * call.in.groups, [&](int64_t i) { prepare_group(call, i); });
}

void multiply(void* data) {
  Call& call = *static_cast<Call*>(data);
  thread_local std::vector<float> sums;
  sums.resize(call.in.tokens * N);
  void (*block)(const Inputs&, int64_t, float*) = call.bits == 4 ? block_portable<4> : block_portable<8>;
#ifdef HAVE_VNNI
  if (call.path == kVnni) block = call.bits == 4 ? block_vnni<4> : block_vnni<8>;
#endif
#ifdef HAVE_AMX
  if (call.in.amx) {
    block = call.bits == 4 ? block_amx<4> : block_amx<8>;
    call.bits == 4 ? configure_tiles<4>(call.in.tokens) : configure_tiles<8>(call.in.tokens);
  }
#endif
  call.each(call.blocks, [&](int64_t b) {
    std::fill(sums.begin(), sums.end(), 0.f);
    block(call.in, b, sums.data());
    for (int64_t t = 0; t < call.in.tokens; t++) write(call.out, t, b * N, sums.data() + t * N);
  });
#ifdef HAVE_AMX
  if (call.in.amx) _tile_release();
#endif
}

}  // namespace

extern "C" {

// The OpenMP runtime's GOMP_parallel, the one that torch uses; null: everything in the calling thread.
typedef void (*minivllm_parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

struct minivllm_matrix {
  const uint8_t* weight;  // as minivllm_pack gave it, with kAhead readable bytes more or not: they are only prefetched
  const float* bias;      // [outputs], or null
  int64_t outputs, inputs, bits;
};

int64_t minivllm_packed_bytes(int64_t outputs, int64_t inputs, int64_t bits) {
  return (outputs + N - 1) / N * (inputs / K) * block_bytes(bits);
}

// Puts outputs into their places in `to`, from `first` on. rows: `count` rows of a GGUF file's blocks of 32 inputs, each
// `halves` fp16 numbers, then codes. 8 bits: a scale, 32 signed codes. 4 bits: a scale and a minimum, or a scale of which
// -8 times is the minimum; 16 bytes that hold inputs i and i + 16. Nothing is written where a block has no output.
// Returns whether all minima are finite.
bool minivllm_pack(const uint8_t* rows, int64_t first, int64_t count, int64_t inputs, int64_t bits, int64_t halves, uint8_t* to,
                   minivllm_parallel parallel, int64_t num_threads) {
  Packing p{rows, to, first, count, inputs / K, bits, halves, {first / N}};
  if (parallel == nullptr || num_threads == 1) pack(&p);
  else parallel(pack, &p, num_threads, 0);
  return p.finite;
}

int64_t minivllm_best_path() {
#ifdef HAVE_VNNI
  return kVnni;
#else
  return kPortable;
#endif
}

// to: bf16 [outputs][inputs].
void minivllm_unpack(const minivllm_matrix* matrix, uint16_t* to, minivllm_parallel parallel, int64_t num_threads) {
  const int64_t groups = matrix->inputs / K;
  Unpacking u{matrix->weight, to, matrix->outputs, groups, matrix->bits, (matrix->outputs + N - 1) / N};
  if (parallel == nullptr || num_threads == 1) unpack(&u);
  else parallel(unpack, &u, num_threads, 0);
}

// y [tokens, outputs] = x [tokens, inputs] W^T + bias; each of x and y dense, bf16 or fp32.
void minivllm_linear(const minivllm_matrix* matrix, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                     int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads) {
  thread_local Prepared prepared;
  const int64_t groups = matrix->inputs / K, blocks = (matrix->outputs + N - 1) / N;
  Prepared& p = prepared;
  p.sums.resize(tokens * groups);
  (path == kVnni ? p.scales : p.x).resize(tokens * groups * (path == kVnni ? 1 : K));
  if (path == kVnni) {  // whole tiles are read, whatever lies behind the last token
    const int64_t readable = tokens > kRows ? (tokens + kRows - 1) / kRows * kRows : tokens;
    p.fixed.resize(readable * groups * 2 * K);
  }
  bool amx = false;
#ifdef HAVE_AMX
  amx = path == kVnni && tokens >= kAmxTokens && minivllm::amx_allowed();
#endif
  Call call{{p.x.data(), p.fixed.data(), p.scales.data(), p.sums.data(), amx, tokens, groups, matrix->weight},
            {y, matrix->bias, matrix->outputs, y_bf16 != 0},
            &p, x, path, matrix->bits, blocks, 0, x_bf16 != 0};
  auto run = [&](void (*work)(void*), int64_t count, bool alone) {
    call.next = 0;
    call.share = alone ? count : std::max<int64_t>(1, count / (8 * num_threads));
    if (alone) work(&call);
    else parallel(work, &call, num_threads, 0);
  };
  const bool alone = parallel == nullptr || num_threads == 1;
  run(prepare, tokens * groups, alone || tokens * groups < 128);  // too little work to wake threads for
  run(multiply, blocks, alone);
}

}  // extern "C"
