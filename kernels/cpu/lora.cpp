// y += B A x for tokens of several LoRA adapters in one call: what a decode step does with few tokens an adapter.
//
// A task is up to CHUNK tokens of one adapter: their hidden vectors (in float), then each part's columns of y. A and B
// are read once for the tokens of a task, and once a step, so their bytes decide the time: both are packed in the order
// in which they are read, and zeros fill up what is no whole block (kernels/cpu/lora.py packs).
//   A  [ranks / RANKS][n_in / (LINE bytes)][RANKS][LINE bytes]
//   B  [num_rows / PANEL][rank][PANEL], each part its own
// Sums are kept in float; y is rounded once. No torch header.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "ahead.h"
#include "simd.h"

namespace minivllm {

constexpr int CHUNK = 4, RANKS = 4, COLUMNS = 4;  // CHUNK x RANKS, then CHUNK x COLUMNS accumulators
constexpr int LINE = 64, PANEL = 64;              // bytes, columns
constexpr int AHEAD = 2560;                       // bytes of a slot asked for before they are needed

struct Part {
  const char* b;  // packed
  int64_t first_rank, rank, first_row, num_rows;
};

struct Delta {
  const char* a;  // packed; null: this slot leaves the layer alone
  int64_t num_ranks, num_parts;  // ranks: a multiple of RANKS
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

// The processor looks ahead within a page alone, and a layer's slot is a few of them.
inline void ask_ahead(const char* from, int bytes) { ask_for<FIRST_LEVEL>(from + AHEAD, bytes); }

// acc[m][j] += one line of A's rows, times as much of x. `x` may be shorter: what is missing is 0.
template <Kind K, int M>
inline void line(const char* a, const char* const* x, int64_t at, int64_t bytes, Floats (&acc)[M][RANKS]) {
  for (int64_t i = 0; i < LINE; i += 4 * LANES) {  // one vector of LINE bytes, or several narrower ones
    Words w[RANKS];
    for (int j = 0; j < RANKS; j++) w[j] = load<Words>(a + j * LINE + i);
    for (int m = 0; m < M; m++) {
      const int64_t left = bytes - at - i;
      Words v = {};
      if (left >= 4 * LANES) v = load<Words>(x[m] + at + i);
      else if (left > 0) std::memcpy(&v, x[m] + at + i, left);
      for (int j = 0; j < RANKS; j++) {
        if constexpr (K == BF16) acc[m][j] = dot_bf16(acc[m][j], w[j], v);
        else acc[m][j] += as_floats(w[j]) * as_floats(v);
      }
    }
  }
}

// hidden[m][0 : RANKS] = a block of A's rows times x.
template <Kind K, int M>
inline void hidden_block(const char* a, int64_t n_in, const char* const* x, int64_t num_ranks, float* hidden) {
  Floats acc[M][RANKS] = {};
  const int64_t bytes = n_in * item_size(K);
  int64_t at = 0;
  for (; at + LINE <= bytes; at += LINE, a += RANKS * LINE) {
    ask_ahead(a, RANKS * LINE);
    line<K, M>(a, x, at, INT64_MAX, acc);
  }
  if (at < bytes) line<K, M>(a, x, at, bytes, acc);
  for (int m = 0; m < M; m++)
    for (int j = 0; j < RANKS; j++) hidden[m * num_ranks + j] = sum(acc[m][j]);
}

// y[:, 0 : columns] += hidden B; columns <= COLUMNS * LANES. b: of the panel, from these columns on.
template <Kind K, int M, bool WHOLE>
inline void column_block(const char* b, int64_t rank, const float* hidden, int64_t num_ranks, int64_t columns,
                         char* const* y) {
  auto count = [&](int c) { return (int)std::clamp<int64_t>(columns - c * LANES, 0, LANES); };
  Floats acc[M][COLUMNS];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < COLUMNS; c++) {
      const char* from = y[m] + c * LANES * item_size(K);
      acc[m][c] = WHOLE ? load_floats<K>(from) : count(c) ? load_some<K>(from, count(c)) : Floats{};
    }
  for (int64_t j = 0; j < rank; j++, b += PANEL * item_size(K)) {
    Floats w[COLUMNS];
    ask_ahead(b, COLUMNS * LANES * item_size(K));
    for (int c = 0; c < COLUMNS; c++) w[c] = load_floats<K>(b + c * LANES * item_size(K));
    for (int m = 0; m < M; m++) {
      Floats h = splat(hidden[m * num_ranks + j]);
      for (int c = 0; c < COLUMNS; c++) acc[m][c] += h * w[c];
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < COLUMNS; c++) {
      char* to = y[m] + c * LANES * item_size(K);
      const size_t size = (WHOLE ? LANES : count(c)) * item_size(K);
      if constexpr (K == BF16) {
        Halves rounded = to_bf16(acc[m][c]);
        std::memcpy(to, &rounded, size);
      } else {
        std::memcpy(to, &acc[m][c], size);
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
  const int64_t lines = (call.n_in * item_size(K) + LINE - 1) / LINE;
  for (int64_t r = 0; r < delta.num_ranks; r += RANKS)
    hidden_block<K, M>(delta.a + r * lines * LINE, call.n_in, x, delta.num_ranks, hidden + r);
  for (int64_t p = 0; p < delta.num_parts; p++) {
    const Part& part = delta.parts[p];
    const float* h = hidden + part.first_rank;
    for (int64_t n = 0; n < part.num_rows; n += COLUMNS * LANES) {
      char* columns[M];
      for (int m = 0; m < M; m++) columns[m] = y[m] + (part.first_row + n) * item_size(K);
      const char* b = part.b + (n / PANEL * part.rank * PANEL + n % PANEL) * item_size(K);
      const int64_t left = part.num_rows - n;
      if (left >= COLUMNS * LANES) column_block<K, M, true>(b, part.rank, h, delta.num_ranks, left, columns);
      else column_block<K, M, false>(b, part.rank, h, delta.num_ranks, left, columns);
    }
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
