// The two products of attention, straight from KV pages: scores = Q K^T and mean += P V, for a few rows at a time.
//
// Rows are (query, query head) pairs that share one KV head, so each word of K and V is unpacked once for all of them.
#pragma once

#include "simd.h"

namespace minivllm {

constexpr int CHUNK = 256;  // keys between two updates of the running softmax; also the largest page
constexpr int BEHIND = 4;   // vectors of keys behind a chunk's that are asked for with its last

// Keys of one page that a chunk reads.
struct Segment {
  const char* k;  // word column of the first key
  const char* v;  // row (or pair of rows) of the first key
  int count;
};

template <Kind K>
constexpr bool BY_DOT = K == BF16 && HAS_BF16_DOT;

// Queries as the inner loop wants them: words of two bfloat16, or floats.
template <Kind K>
using Query = std::conditional_t<BY_DOT<K>, uint32_t, float>;
// Softmax weights likewise. Without pairs of keys in V there is nothing for the dot instruction to add up.
template <Kind K, bool PAIRS>
using Weight = std::conditional_t<BY_DOT<K> && PAIRS, uint16_t, float>;

// scores[row][lane of vector j] for ROWS rows and NV vectors of keys. keys[j] points at word 0 of LANES keys, the words
// of one key lie `stride` apart. q [ROWS][words][...]. What a decode comes to next is asked for meanwhile, since it lies
// in jumps that the processor does not foresee: the K of the NV vectors behind these, and these keys' V, for after the
// softmax. `ahead`: bytes from K to V of a page.
template <Kind K, int ROWS, int NV>
inline void dot_tile(const uint32_t* const* keys, size_t stride, size_t ahead, const Query<K>* q, int words,
                     float* scores) {
  constexpr int PER = 4 / item_size(K);
  Floats acc[ROWS][NV] = {};
  for (int w = 0; w < words; w++) {
    Words word[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      word[j] = load<Words>(keys[j] + w * stride);
      __builtin_prefetch(keys[j + NV] + w * stride);
      __builtin_prefetch((const char*)(keys[j] + w * stride) + ahead);
    }
    if constexpr (BY_DOT<K>) {
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) acc[m][j] = dot_bf16(acc[m][j], word[j], splat_word(q[m * words + w]));
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < PER; i++) {
        Floats part[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) part[j] = unpack<K>(word[j], i);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) acc[m][j] += part[j] * q[(m * words + w) * PER + i];
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(scores + m * CHUNK + j * LANES, acc[m][j]);
}

// mean[row][d0 ...] += weights[row] V for ROWS rows and NV vectors of the head's elements; TAIL: one vector, of which
// only `tail` elements exist. V: rows [key][head_size], or with PAIRS words [key / 2][head_size] of two keys.
template <Kind K, bool PAIRS, int ROWS, int NV, bool TAIL>
inline void mean_tile(const Segment* segments, int num_segments, int head_size, int d0, const Weight<K, PAIRS>* weights,
                      float* mean, int mean_stride) {
  const int tail = head_size - d0;
  Floats acc[ROWS][NV];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[m][j] = load<Floats>(mean + m * mean_stride + d0 + j * LANES);
  for (const Segment* s = segments; s < segments + num_segments; s++) {
    if constexpr (PAIRS) {
      const char* from = s->v + d0 * 4;
      for (int t = 0; t < s->count; t += 2, from += head_size * 4) {
        // An odd end: what lies beside the last key was never written and may be NaN.
        const uint32_t owned = t + 1 < s->count ? 0xffffffffu : 0xffffu;
        Words word[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
          word[j] = (TAIL ? load_some_words(from, tail) : load<Words>(from + j * LANES * 4)) & owned;
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
          if constexpr (BY_DOT<K>) {
            Words pair = splat_word(load<uint32_t>(weights + m * CHUNK + t));
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) acc[m][j] = dot_bf16(acc[m][j], word[j], pair);
          } else {
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++) {
              acc[m][j] += unpack<K>(word[j], 0) * weights[m * CHUNK + t];
              acc[m][j] += unpack<K>(word[j], 1) * weights[m * CHUNK + t + 1];
            }
          }
        }
      }
    } else {
      const char* from = s->v + d0 * item_size(K);
      for (int t = 0; t < s->count; t++, from += head_size * item_size(K)) {
        Floats value[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
          value[j] = TAIL ? load_some<K>(from, tail) : load_floats<K>(from + j * LANES * item_size(K));
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
          for (int j = 0; j < NV; j++) acc[m][j] += value[j] * float(weights[m * CHUNK + t]);
      }
    }
    weights += s->count;
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(mean + m * mean_stride + d0 + j * LANES, acc[m][j]);
}

// scores [rows][CHUNK]: all rows against all vectors of keys. A few vectors meet all rows before the next are read: so
// many stay in the first-level cache.
template <Kind K>
inline void scores_of(const uint32_t* const* keys, int num_vectors, size_t stride, size_t ahead, const Query<K>* q,
                      int words, int rows, float* scores) {
  constexpr int PER_QUERY = BY_DOT<K> ? 1 : 4 / item_size(K);
  auto meet = [&]<int NV>(int j) {
    for_rows(rows, [&]<int ROWS>(int m) {
      constexpr int AT_ONCE = std::min(NV, WIDTH<ROWS>);
#pragma GCC unroll 4
      for (int i = 0; i < NV; i += AT_ONCE)
        dot_tile<K, ROWS, AT_ONCE>(keys + j + i, stride, ahead, q + m * words * PER_QUERY, words,
                                   scores + m * CHUNK + (j + i) * LANES);
    });
  };
  int j = 0;
  for (; j + 4 <= num_vectors; j += 4) meet.template operator()<4>(j);
  for (; j < num_vectors; j++) meet.template operator()<1>(j);
}

template <Kind K, bool PAIRS>
inline void add_means(const Segment* segments, int num_segments, int head_size, int rows,
                      const Weight<K, PAIRS>* weights, float* mean, int mean_stride) {
  constexpr int NEAR = 64;  // keys whose values stay in the first-level cache while all rows meet them
  for (int first = 0, last, keys; first < num_segments; first = last, weights += keys) {
    keys = 0;
    for (last = first; last < num_segments && (rows <= MAX_ROWS || keys == 0 || keys + segments[last].count <= NEAR);)
      keys += segments[last++].count;
    for_rows(rows, [&]<int ROWS>(int m) {
      const Weight<K, PAIRS>* w = weights + m * CHUNK;
      const Segment* from = segments + first;
      float* to = mean + m * mean_stride;
      int d = 0;
      for (; d + WIDTH<ROWS> * LANES <= head_size; d += WIDTH<ROWS> * LANES)
        mean_tile<K, PAIRS, ROWS, WIDTH<ROWS>, false>(from, last - first, head_size, d, w, to, mean_stride);
      for (; d + LANES <= head_size; d += LANES)
        mean_tile<K, PAIRS, ROWS, 1, false>(from, last - first, head_size, d, w, to, mean_stride);
      if (d < head_size) mean_tile<K, PAIRS, ROWS, 1, true>(from, last - first, head_size, d, w, to, mean_stride);
    });
  }
}

}  // namespace minivllm
