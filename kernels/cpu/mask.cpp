// The logits of tokens that a mask does not allow become -inf: grammars' masks of one bit a token, many rows at once.
//
// A word of a mask stands for 32 logits. In most positions of a grammar nearly all words are 0: those logits are written
// without being read, which is half of the memory traffic of a minimum over whole rows.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace {

struct Call {
  float* logits;           // [rows of the step][vocab]
  const int64_t* rows;     // [count]: which of them
  const uint32_t* masks;   // [count][words]
  int64_t vocab, words, count;
  std::atomic<int64_t> next{0};
};

void mask_row(float* row, const uint32_t* mask, int64_t vocab) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < vocab; first += 32) {
    const uint32_t allowed = mask[first / 32];
    const int64_t count = std::min<int64_t>(32, vocab - first);
    float* to = row + first;
    if (allowed == 0)
      std::fill(to, to + count, kNever);
    else if (allowed != ~0u)
      for (int64_t i = 0; i < count; i++) to[i] = allowed >> i & 1 ? to[i] : kNever;
  }
}

void work(void* data) {
  Call& call = *static_cast<Call*>(data);
  for (int64_t i; (i = call.next.fetch_add(1, std::memory_order_relaxed)) < call.count;)
    mask_row(call.logits + call.rows[i] * call.vocab, call.masks + i * call.words, call.vocab);
}

}  // namespace

typedef void (*minivllm_parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

// rows: distinct. parallel: GOMP_parallel of the OpenMP runtime that torch uses; null: everything in the calling thread.
extern "C" void minivllm_mask(float* logits, const int64_t* rows, const uint32_t* masks, int64_t vocab, int64_t words,
                              int64_t count, minivllm_parallel parallel, int64_t num_threads) {
  Call call{logits, rows, masks, vocab, words, count};
  if (parallel == nullptr || num_threads == 1 || count == 1) work(&call);
  else parallel(work, &call, (unsigned)num_threads, 0);
}
