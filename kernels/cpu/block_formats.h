// The blocks of a GGUF file: how each kind keeps 32 or 256 weights of a row, taken apart into codes, scales and minima.
//
//   w = d * scale[g] * (value(code) - offset) - dmin * minimum[g]        K-quants, for each group g of 16 or 32 weights
//   w = d * (value(code) - offset) + m                                   the older kinds, one group a block
//
// value(code) is the code itself, or for IQ4 an entry of a table. The layouts of bytes are those of ggml-common.h in
// llama.cpp; the tests' oracle is the `gguf` package's own decoder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace minivllm {

// In the order of KINDS in blocks.py.
enum class BlockKind : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, COUNT };

// What is fixed for a kind. bits: of a code, kept in planes of 8, 4, 2 and 1 bits. minima: 0 none, 1 an fp16 m that is
// added, 2 dmin times an integer a group, which is subtracted.
struct Format {
  int block, bytes, group, bits, offset, minima;
  bool scales, table, is_signed;  // scales: an integer scale for each group; table: codes are indices of IQ4's values
};

constexpr Format format_of(BlockKind kind) {
  switch (kind) {
    case BlockKind::Q4_0: return {32, 18, 32, 4, 8, 0, false, false, false};
    case BlockKind::Q4_1: return {32, 20, 32, 4, 0, 1, false, false, false};
    case BlockKind::Q5_0: return {32, 22, 32, 5, 16, 0, false, false, false};
    case BlockKind::Q5_1: return {32, 24, 32, 5, 0, 1, false, false, false};
    case BlockKind::Q8_0: return {32, 34, 32, 8, 0, 0, false, false, true};
    case BlockKind::Q2_K: return {256, 84, 16, 2, 0, 2, true, false, false};
    case BlockKind::Q3_K: return {256, 110, 16, 3, 4, 0, true, false, false};
    case BlockKind::Q4_K: return {256, 144, 32, 4, 0, 2, true, false, false};
    case BlockKind::Q5_K: return {256, 176, 32, 5, 0, 2, true, false, false};
    case BlockKind::Q6_K: return {256, 210, 16, 6, 32, 0, true, false, false};
    case BlockKind::IQ4_NL: return {32, 18, 32, 4, 127, 0, false, true, false};
    case BlockKind::IQ4_XS: return {256, 136, 32, 4, 127, 0, true, true, false};
    default: return {};
  }
}

// IQ4's values, 127 added, so that they are bytes without sign and the first is 0.
alignas(16) constexpr uint8_t IQ4_VALUES[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

// One block of one row, taken apart.
struct Block {
  uint16_t d, m;        // fp16; m: of the kinds with minima, dmin or m
  int8_t scales[16];    // of each group; unset where a kind has none
  uint8_t minima[16];
  uint8_t codes[256];   // as stored: offset, table and sign are still to be minded
};

inline uint16_t half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

inline float float_of_half(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    bits |= 0x7f800000u;
    std::memcpy(&value, &bits, 4);
  } else {  // 2^112 moves the exponent, and makes subnormals normal
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
  }
  return h & 0x8000u ? -value : value;
}

// Halves of bytes: the low ones are the first 16 codes.
inline void read_nibbles(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < count; i++) {
    low[i] = from[i] & 15;
    high[i] = from[i] >> 4;
  }
}

inline void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; i++) codes[i] |= (bits >> i & 1) << 4;
}

// Two bits of each: 128 codes out of 32 bytes, 32 of them at each pair of bits.
inline void read_pairs(const uint8_t* from, uint8_t* codes) {
  for (int s = 0; s < 4; s++)
    for (int i = 0; i < 32; i++) codes[32 * s + i] = from[i] >> (2 * s) & 3;
}

// The 6-bit scales and minima of Q4_K and Q5_K: 8 of each in 12 bytes.
inline void read_scales_and_minima(const uint8_t* from, Block& to) {
  for (int g = 0; g < 4; g++) {
    to.scales[g] = from[g] & 63;
    to.minima[g] = from[g + 4] & 63;
    to.scales[g + 4] = (from[g + 8] & 15) | from[g] >> 6 << 4;
    to.minima[g + 4] = from[g + 8] >> 4 | from[g + 4] >> 6 << 4;
  }
}

template <BlockKind K>
inline void take_apart(const uint8_t* raw, Block& to) {
  constexpr Format F = format_of(K);
  if constexpr (F.block == 32) {
    to.d = half_at(raw);
    raw += 2;
    if constexpr (F.minima == 1) to.m = half_at(raw), raw += 2;
    if constexpr (K == BlockKind::Q8_0) {
      std::memcpy(to.codes, raw, 32);
    } else {
      read_nibbles(raw + (F.bits == 5 ? 4 : 0), 16, to.codes, to.codes + 16);
      if constexpr (F.bits == 5) add_fifth_bits(raw, to.codes);
    }
  } else if constexpr (K == BlockKind::Q4_K || K == BlockKind::Q5_K) {
    to.d = half_at(raw);
    to.m = half_at(raw + 2);
    read_scales_and_minima(raw + 4, to);
    const uint8_t *fifth = raw + 16, *low = fifth + (K == BlockKind::Q5_K ? 32 : 0);
    for (int j = 0; j < 4; j++) {
      uint8_t* codes = to.codes + 64 * j;
      read_nibbles(low + 32 * j, 32, codes, codes + 32);
      if constexpr (K == BlockKind::Q5_K)
        for (int i = 0; i < 64; i++) codes[i] |= (fifth[i % 32] >> (2 * j + i / 32) & 1) << 4;
    }
  } else if constexpr (K == BlockKind::Q6_K) {
    const uint8_t *low = raw, *high = raw + 128;
    for (int half = 0; half < 2; half++, low += 64, high += 32) {
      uint8_t *codes = to.codes + 128 * half, pairs[128];
      read_nibbles(low, 64, codes, codes + 64);
      read_pairs(high, pairs);
      for (int i = 0; i < 128; i++) codes[i] |= pairs[i] << 4;
    }
    std::memcpy(to.scales, raw + 192, 16);
    to.d = half_at(raw + 208);
  } else if constexpr (K == BlockKind::Q2_K) {
    for (int g = 0; g < 16; g++) {
      to.scales[g] = raw[g] & 15;
      to.minima[g] = raw[g] >> 4;
    }
    for (int half = 0; half < 2; half++) read_pairs(raw + 16 + 32 * half, to.codes + 128 * half);
    to.d = half_at(raw + 80);
    to.m = half_at(raw + 82);
  } else if constexpr (K == BlockKind::Q3_K) {
    const uint8_t *third = raw, *packed = raw + 96;
    for (int half = 0; half < 2; half++) {
      uint8_t* codes = to.codes + 128 * half;
      read_pairs(raw + 32 + 32 * half, codes);
      for (int i = 0; i < 128; i++) codes[i] |= (third[i % 32] >> (4 * half + i / 32) & 1) << 2;
    }
    for (int g = 0; g < 16; g++) {
      const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
      to.scales[g] = int8_t((low | (packed[8 + g % 4] >> (2 * (g / 4)) & 3) << 4) - 32);
    }
    to.d = half_at(raw + 108);
  } else {
    static_assert(K == BlockKind::IQ4_XS);
    to.d = half_at(raw);
    const uint16_t high = half_at(raw + 2);
    for (int g = 0; g < 8; g++) {
      const int low = raw[4 + g / 2] >> (4 * (g % 2)) & 15;
      to.scales[g] = int8_t((low | (high >> (2 * g) & 3) << 4) - 32);
      read_nibbles(raw + 8 + 16 * g, 16, to.codes + 32 * g, to.codes + 32 * g + 16);
    }
  }
}

// The weights of a block in fp32: exact but for one rounding where something is added, as gguf's decoder does it.
template <BlockKind K>
inline void dequantise_block(const uint8_t* raw, float* to) {
  constexpr Format F = format_of(K);
  Block b;
  take_apart<K>(raw, b);
  const float d = float_of_half(b.d), m = F.minima ? float_of_half(b.m) : 0.f;
  for (int first = 0; first < F.block; first += F.group) {
    const int g = first / F.group;
    const float scale = F.scales ? d * float(b.scales[g]) : d;
    const float minimum = F.minima == 2 ? -(m * float(b.minima[g])) : m;
    for (int i = first; i < first + F.group; i++) {
      const int code = F.is_signed ? int8_t(b.codes[i]) : F.table ? IQ4_VALUES[b.codes[i]] : b.codes[i];
      const float product = scale * float(code - F.offset);  // exact: at most 24 bits
      to[i] = F.minima ? product + minimum : product;
    }
  }
}

}  // namespace minivllm
