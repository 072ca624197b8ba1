// The two products of tiles.h on Intel's matrix unit (AMX, bfloat16): 16 rows x 16 columns x 32 terms an instruction.
// K and V lie in pages as its right operand wants them (words of two terms, one output column beside the other), so tiles
// are loaded straight from the cache.
#pragma once

#include <cstdint>

#include "amx_permission.h"
#include "tiles.h"

#if defined(MINIVLLM_AMX) && defined(__AMX_BF16__)
#define MINIVLLM_AMX_BF16 1
#endif

namespace minivllm {

// Fewer rows are left to the vector unit: they would waste most of a tile, and decodes wait for memory anyway.
constexpr int AMX_ROWS = 8;

#ifdef MINIVLLM_AMX_BF16

// Tiles 0-3 are sums [16][16], 4 and 5 left operands [16][2 * terms], 6 and 7 right ones [terms][16]; terms: words.
inline void configure(int terms) {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = i == 4 || i == 5 ? terms * 4 : 64;
    config.rows[i] = i >= 6 ? terms : 16;
  }
  config.load();
}

// scores for M x 16 rows and N x 16 keys.
template <int M, int N>
inline void amx_scores(const uint32_t* const* keys, size_t stride, const uint32_t* q, int words, float* scores) {
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (M == 2) _tile_zero(2);
  if constexpr (M == 2 && N == 2) _tile_zero(3);
  for (int w = 0; w < words; w += 16) {
    _tile_loadd(4, q + w, words * 4);
    _tile_loadd(6, keys[0] + w * stride, stride * 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, keys[1] + w * stride, stride * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, q + 16 * words + w, words * 4);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, scores, CHUNK * 4);
  if constexpr (N == 2) _tile_stored(1, scores + 16, CHUNK * 4);
  if constexpr (M == 2) _tile_stored(2, scores + 16 * CHUNK, CHUNK * 4);
  if constexpr (M == 2 && N == 2) _tile_stored(3, scores + 16 * CHUNK + 16, CHUNK * 4);
}

// mean += weights V for M x 16 rows and 32 of the head's elements, over whole steps of `terms` pairs of keys.
template <int M>
inline void amx_means(const Segment* segments, int num_segments, int head_size, int d, int terms,
                      const uint16_t* weights, float* mean, int mean_stride) {
  _tile_loadd(0, mean + d, mean_stride * 4);
  _tile_loadd(1, mean + d + 16, mean_stride * 4);
  if constexpr (M == 2) {
    _tile_loadd(2, mean + 16 * mean_stride + d, mean_stride * 4);
    _tile_loadd(3, mean + 16 * mean_stride + d + 16, mean_stride * 4);
  }
  for (const Segment* s = segments; s < segments + num_segments; weights += s->count, s++)
    for (int t = 0; t + 2 * terms <= s->count; t += 2 * terms) {
      const char* v = s->v + (size_t(t / 2) * head_size + d) * 4;
      _tile_loadd(4, weights + t, CHUNK * 2);
      _tile_loadd(6, v, head_size * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 64, head_size * 4);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (M == 2) {
        _tile_loadd(5, weights + 16 * CHUNK + t, CHUNK * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  _tile_stored(0, mean + d, mean_stride * 4);
  _tile_stored(1, mean + d + 16, mean_stride * 4);
  if constexpr (M == 2) {
    _tile_stored(2, mean + 16 * mean_stride + d, mean_stride * 4);
    _tile_stored(3, mean + 16 * mean_stride + d + 16, mean_stride * 4);
  }
}

// As scores_of; all operands reach up to a multiple of 16 rows.
inline void amx_scores_of(const uint32_t* const* keys, int num_vectors, size_t stride, const uint32_t* q, int words,
                          int rows, float* scores) {
  configure(16);
  for (int m = 0; m < rows; m += 32) {
    const uint32_t* query = q + m * words;
    for (int j = 0; j < num_vectors; j += 2) {
      float* to = scores + m * CHUNK + j * 16;
      if (rows - m > 16)
        j + 1 < num_vectors ? amx_scores<2, 2>(keys + j, stride, query, words, to)
                            : amx_scores<2, 1>(keys + j, stride, query, words, to);
      else
        j + 1 < num_vectors ? amx_scores<1, 2>(keys + j, stride, query, words, to)
                            : amx_scores<1, 1>(keys + j, stride, query, words, to);
    }
  }
  _tile_release();
}

// As add_means, with steps of `terms` pairs; what is left of the last segment goes the other way, which minds its end.
inline void amx_add_means(Segment* segments, int num_segments, int head_size, int terms, int rows,
                          const uint16_t* weights, float* mean, int mean_stride) {
  configure(terms);
  for (int m = 0; m < rows; m += 32)
    for (int d = 0; d < head_size; d += 32) {
      const uint16_t* w = weights + m * CHUNK;
      float* to = mean + m * mean_stride;
      if (rows - m > 16)
        amx_means<2>(segments, num_segments, head_size, d, terms, w, to, mean_stride);
      else
        amx_means<1>(segments, num_segments, head_size, d, terms, w, to, mean_stride);
    }
  _tile_release();
  int before = 0;
  for (int s = 0; s < num_segments; before += segments[s++].count) {
    const int done = segments[s].count / (2 * terms) * (2 * terms), left = segments[s].count - done;
    if (left == 0) continue;
    const Segment rest{nullptr, segments[s].v + size_t(done / 2) * head_size * 4, left};
    add_means<BF16, true>(&rest, 1, head_size, rows, weights + before + done, mean, mean_stride);
  }
}

#endif

}  // namespace minivllm
