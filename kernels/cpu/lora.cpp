// y += B A x for tokens of several LoRA adapters in one call: what a decode step does with few tokens an adapter.
//
// A task is up to CHUNK tokens of one adapter: their hidden vectors (in float), then each part's columns of y. A and B
// are read once for the tokens of a task. Sums are kept in float; y is rounded once. No torch header.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace minivllm {

constexpr int CHUNK = 4, RANKS = 4, COLUMNS = 4;  // CHUNK x RANKS, then CHUNK x COLUMNS accumulators

struct Part {
  const char* b;  // [rank, num_rows]
  int64_t first_rank, rank, first_row, num_rows;
};

struct Delta {
  const char* a;  // [num_ranks, n_in]; null: this slot leaves the layer alone
  int64_t num_ranks, num_parts;
  Part parts[3];
};

struct Groups {
  int64_t num_tasks;
  const int64_t* tasks;   // [num_tasks, 3]: slot, first and last + 1 of its tokens in `tokens`
  const int64_t* tokens;  // token rows, those of an adapter together
};

struct Call {
  const Delta* slots;
  const Groups* groups;
  const char* x;  // [T, n_in]
  char* y;        // [T, n_out]
  int64_t n_in, n_out;
  void (*task)(const Call&, const int64_t*);
  std::atomic<int64_t> next{0};
};

inline float sum(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
#endif
}

// acc += the products of `a` with `x` over n elements of which whole vectors are taken; returns how many.
template <Kind K, int M, int J>
inline int64_t dots(const char* const* a, const char* const* x, int64_t n, Floats (&acc)[M][J]) {
  constexpr int64_t step = K == BF16 ? 2 * LANES : LANES;
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    if constexpr (K == BF16) {
      Words w[J];
      for (int j = 0; j < J; j++) w[j] = load<Words>(a[j] + 2 * i);
      for (int m = 0; m < M; m++) {
        Words v = load<Words>(x[m] + 2 * i);
        for (int j = 0; j < J; j++) acc[m][j] = dot_bf16(acc[m][j], w[j], v);
      }
    } else {
      Floats w[J];
      for (int j = 0; j < J; j++) w[j] = load<Floats>(a[j] + 4 * i);
      for (int m = 0; m < M; m++) {
        Floats v = load<Floats>(x[m] + 4 * i);
        for (int j = 0; j < J; j++) acc[m][j] += w[j] * v;
      }
    }
  }
  return i;
}

template <Kind K, int M, int J>
inline void hidden_block(const Delta& delta, int64_t first, int64_t n_in, const char* const* x, float* hidden) {
  const char* a[J];
  Floats acc[M][J] = {};
  for (int j = 0; j < J; j++) a[j] = delta.a + (first + j) * n_in * item_size(K);
  int64_t done = dots<K, M, J>(a, x, n_in, acc);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < J; j++) {
      float total = sum(acc[m][j]);
      for (int64_t i = done; i < n_in; i++)
        total += to_float(K, a[j] + i * item_size(K)) * to_float(K, x[m] + i * item_size(K));
      hidden[m * delta.num_ranks + first + j] = total;
    }
}

// y[:, n : n + C * LANES] += hidden B
template <Kind K, int M, int C>
inline void column_block(const Part& part, int64_t n, const float* hidden, int64_t num_ranks, char* const* y) {
  Floats acc[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) acc[m][c] = load_floats<K>(y[m] + (n + c * LANES) * item_size(K));
  for (int64_t j = 0; j < part.rank; j++) {
    const char* b = part.b + (j * part.num_rows + n) * item_size(K);
    Floats w[C];
    for (int c = 0; c < C; c++) w[c] = load_floats<K>(b + c * LANES * item_size(K));
    for (int m = 0; m < M; m++) {
      Floats h = splat(hidden[m * num_ranks + j]);
      for (int c = 0; c < C; c++) acc[m][c] += h * w[c];
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) {
      char* to = y[m] + (n + c * LANES) * item_size(K);
      if constexpr (K == BF16) store(to, to_bf16(acc[m][c]));
      else store(to, acc[m][c]);
    }
}

template <Kind K, int M>
inline void last_column(const Part& part, int64_t n, const float* hidden, int64_t num_ranks, char* const* y) {
  for (int m = 0; m < M; m++) {
    char* to = y[m] + n * item_size(K);
    float total = to_float(K, to);
    for (int64_t j = 0; j < part.rank; j++)
      total += hidden[m * num_ranks + j] * to_float(K, part.b + (j * part.num_rows + n) * item_size(K));
    if constexpr (K == BF16) {
      uint16_t rounded = to_bf16(splat(total))[0];
      std::memcpy(to, &rounded, 2);
    } else {
      std::memcpy(to, &total, 4);
    }
  }
}

template <Kind K, int M>
void chunk(const Call& call, const Delta& delta, const int64_t* tokens, float* hidden) {
  const char* x[M];
  char* y[M];
  for (int m = 0; m < M; m++) {
    x[m] = call.x + tokens[m] * call.n_in * item_size(K);
    y[m] = call.y + tokens[m] * call.n_out * item_size(K);
  }
  int64_t r = 0;
  for (; r + RANKS <= delta.num_ranks; r += RANKS) hidden_block<K, M, RANKS>(delta, r, call.n_in, x, hidden);
  for (; r < delta.num_ranks; r++) hidden_block<K, M, 1>(delta, r, call.n_in, x, hidden);
  for (int64_t p = 0; p < delta.num_parts; p++) {
    const Part& part = delta.parts[p];
    char* columns[M];
    for (int m = 0; m < M; m++) columns[m] = y[m] + part.first_row * item_size(K);
    const float* h = hidden + part.first_rank;
    int64_t n = 0;
    for (; n + COLUMNS * LANES <= part.num_rows; n += COLUMNS * LANES)
      column_block<K, M, COLUMNS>(part, n, h, delta.num_ranks, columns);
    for (; n + LANES <= part.num_rows; n += LANES) column_block<K, M, 1>(part, n, h, delta.num_ranks, columns);
    for (; n < part.num_rows; n++) last_column<K, M>(part, n, h, delta.num_ranks, columns);
  }
}

template <Kind K>
void task(const Call& call, const int64_t* t) {
  const Delta& delta = call.slots[t[0]];
  if (delta.a == nullptr) return;
  thread_local std::vector<float> hidden;
  if ((int64_t)hidden.size() < CHUNK * delta.num_ranks) hidden.resize(CHUNK * delta.num_ranks);
  for (int64_t i = t[1]; i < t[2]; i += CHUNK) {
    const int64_t* tokens = call.groups->tokens + i;
    switch (std::min<int64_t>(CHUNK, t[2] - i)) {
      case 1: chunk<K, 1>(call, delta, tokens, hidden.data()); break;
      case 2: chunk<K, 2>(call, delta, tokens, hidden.data()); break;
      case 3: chunk<K, 3>(call, delta, tokens, hidden.data()); break;
      default: chunk<K, 4>(call, delta, tokens, hidden.data());
    }
  }
}

void work(void* data) {
  Call& call = *(Call*)data;
  for (int64_t i; (i = call.next.fetch_add(1)) < call.groups->num_tasks;) call.task(call, call.groups->tasks + 3 * i);
}

}  // namespace minivllm

typedef void (*minivllm_parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

// parallel: GOMP_parallel of the OpenMP runtime that torch uses; null: everything in the calling thread.
extern "C" void minivllm_lora(const minivllm::Delta* slots, const minivllm::Groups* groups, const void* x, void* y,
                              int64_t n_in, int64_t n_out, int64_t is_bf16, minivllm_parallel parallel,
                              int64_t num_threads) {
  using namespace minivllm;
  Call call{slots, groups, (const char*)x, (char*)y, n_in, n_out, is_bf16 ? task<BF16> : task<F32>};
  if (parallel == nullptr || num_threads == 1 || groups->num_tasks == 1) work(&call);
  else parallel(work, &call, (unsigned)num_threads, 0);
}
