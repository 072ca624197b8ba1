// Absorbed latent attention over pages (minivllm/attention/latent.py has the two forms, and the oracle): every head of a
// query attends over the tokens' vectors themselves, [slots][size], of which the first `rank` numbers are its values.
//
// A task is a query with some of its heads. It goes over the vectors of the query's request in tiles, once, and keeps
// what a softmax needs to go on: the largest score so far, the sum of weights, and the weighted sum of values (Milakov and
// Gimelshein 2018). A tile's vectors lie in the first-level caches while all heads of the task meet them: MAX_ROWS heads
// times two vectors, then times two of their pieces, stay in registers. All is computed in float. No torch header.
#include <algorithm>
#include <limits>
#include <vector>

#include "items.h"
#include "simd.h"

namespace minivllm {

constexpr int TILE = 32;  // vectors, a multiple of LANES

struct Latents {
  const void* cache;       // [slots][size], of `kind`
  const int32_t* tables;   // [requests][width]
  const int32_t* owners;   // [queries]: whose tables a query reads
  const int32_t* limits;   // [queries]: how many tokens it sees
  const float* q;          // [queries][heads][size]
  float* out;              // [queries][heads][rank]
  int64_t width, block_size, size, rank, heads, queries, heads_each;  // heads_each: of a task
  float scale;
  int32_t kind;  // F32, F16 or BF16
};

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// What a task writes to: kept by its thread from call to call.
struct Scratch {
  std::vector<float> q, keys, out, scores;
  std::vector<float> largest, sums, factors;
};

// `count` numbers as float, zeros up to a whole vector.
template <Kind K>
inline void widen(const char* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load_floats<K>(from + i * item_size(K)));
  if (i < count) store(to + i, load_some<K>(from + i * item_size(K), int(count - i)));
}

// scores[r][n] = q[r] . keys[n], of R heads and two keys.
template <int R>
inline void dot(const float* q, int64_t stride, const float* first, const float* second, float* scores) {
  Floats sums[R][2] = {};
  for (int64_t i = 0; i < stride; i += LANES) {
    const Floats a = load<Floats>(first + i), b = load<Floats>(second + i);
    for (int r = 0; r < R; r++) {
      const Floats x = load<Floats>(q + r * stride + i);
      sums[r][0] += x * a;
      sums[r][1] += x * b;
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < 2; n++) scores[r * TILE + n] = sum_of(sums[r][n]);
}

// out[r] = out[r] * factors[r] + sum over n of weights[r][n] * keys[n], of W vectors from `at` on.
template <int R, int W>
inline void mix(const float* weights, const float* const* keys, int count, const float* factors, int64_t at, float* out,
                int64_t stride) {
  Floats sums[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) sums[r][w] = load<Floats>(out + r * stride + at + w * LANES) * factors[r];
  for (int n = 0; n < count; n++) {
    Floats values[W];
    for (int w = 0; w < W; w++) values[w] = load<Floats>(keys[n] + at + w * LANES);
    for (int r = 0; r < R; r++) {
      const float weight = weights[r * TILE + n];
      for (int w = 0; w < W; w++) sums[r][w] += values[w] * weight;
    }
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) store(out + r * stride + at + w * LANES, sums[r][w]);
}

// Scores become weights relative to the largest score so far; what was summed before is scaled by `factor` from now on.
inline void weigh(float* scores, int count, float scale, float& largest, float& sum, float& factor) {
  for (int n = 0; n < count; n++) scores[n] *= scale;
  for (int n = count; n < TILE; n++) scores[n] = -std::numeric_limits<float>::infinity();
  Floats most = load<Floats>(scores);
  for (int n = LANES; n < TILE; n += LANES) most = larger(most, load<Floats>(scores + n));
  const float before = largest;
  largest = std::max(before, max_of(most));
  Floats added = {};
  for (int n = 0; n < TILE; n += LANES) {
    const Floats weights = exp2_of_negative(load<Floats>(scores + n) - largest);
    store(scores + n, weights);
    added += weights;
  }
  factor = std::exp2(before - largest);
  sum = sum * factor + sum_of(added);
}

template <Kind K>
void attend_one(const Latents& of, int64_t query, int64_t first_head, int64_t heads) {
  static thread_local Scratch own;
  const int64_t stride = padded(of.size), values = padded(of.rank), row_bytes = of.size * item_size(K);
  const bool in_place = K == F32 && stride == of.size;  // else a tile is widened first
  own.q.resize(heads * stride), own.out.assign(heads * values, 0.0f), own.scores.resize(heads * TILE);
  own.largest.assign(heads, -std::numeric_limits<float>::infinity()), own.sums.assign(heads, 0.0f);
  own.factors.resize(heads);
  if (!in_place) own.keys.resize(TILE * stride);
  const int64_t from = query * of.heads + first_head;
  for (int64_t h = 0; h < heads; h++)
    widen<F32>(reinterpret_cast<const char*>(of.q + (from + h) * of.size), of.size, own.q.data() + h * stride);
  const int32_t* const table = of.tables + of.owners[query] * of.width;
  const char* const cache = static_cast<const char*>(of.cache);
  const float scale = of.scale * 1.44269504f;  // weights are powers of two
  const float* keys[TILE + 1];
  for (int64_t begin = 0; begin < of.limits[query]; begin += TILE) {
    const int count = int(std::min<int64_t>(TILE, of.limits[query] - begin));
    for (int n = 0; n < count; n++) {
      const int64_t token = begin + n, slot = table[token / of.block_size] * of.block_size + token % of.block_size;
      const char* const row = cache + slot * row_bytes;
      keys[n] = reinterpret_cast<const float*>(row);
      if (!in_place) {
        widen<K>(row, of.size, own.keys.data() + n * stride);
        keys[n] = own.keys.data() + n * stride;
      }
    }
    keys[count] = keys[count - 1];  // of an odd count: its scores are overwritten
    for_rows(int(heads), [&]<int R>(int h) {
      float* const scores = own.scores.data() + h * TILE;
      for (int n = 0; n < count; n += 2) dot<R>(own.q.data() + h * stride, stride, keys[n], keys[n + 1], scores + n);
      for (int r = 0; r < R; r++)
        weigh(scores + r * TILE, count, scale, own.largest[h + r], own.sums[h + r], own.factors[h + r]);
      float* const out = own.out.data() + h * values;
      int64_t at = 0;
      for (; at + 2 * LANES <= values; at += 2 * LANES)
        mix<R, 2>(scores, keys, count, own.factors.data() + h, at, out, values);
      if (at < values) mix<R, 1>(scores, keys, count, own.factors.data() + h, at, out, values);
    });
  }
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < of.rank; i++)
      of.out[(from + h) * of.rank + i] = own.out[h * values + i] / own.sums[h];
}

}  // namespace minivllm

// Every query sees one token at least. parallel: as minivllm_mask's.
extern "C" void minivllm_latent(const minivllm::Latents* of, minivllm_parallel parallel, int64_t num_threads) {
  using namespace minivllm;
  const int64_t tasks = (of->heads + of->heads_each - 1) / of->heads_each;  // of a query
  const auto work = [&](int64_t i) {
    const int64_t query = i / tasks, first = i % tasks * of->heads_each;
    const int64_t heads = std::min(of->heads_each, of->heads - first);
    if (of->kind == F32) attend_one<F32>(*of, query, first, heads);
    else if (of->kind == F16) attend_one<F16>(*of, query, first, heads);
    else attend_one<BF16>(*of, query, first, heads);
  };
  each(of->queries * tasks, work, parallel, num_threads);
}
