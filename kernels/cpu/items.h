// Work for several threads, and numbers as they go in and out.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "block_kind.h"

namespace minivllm {

// Threads take items until none is left: one whose core is wanted elsewhere then takes fewer.
template <typename Work>
struct Items {
  const Work& work;
  int64_t count, share;
  std::atomic<int64_t> next{0};

  static void run(void* data) {
    Items& items = *static_cast<Items*>(data);
    for (int64_t begin; (begin = items.next.fetch_add(items.share, std::memory_order_relaxed)) < items.count;)
      for (int64_t i = begin; i < std::min(items.count, begin + items.share); i++) items.work(i);
  }
};

// work(i) for i < count; parallel null: in the calling thread.
template <typename Work>
inline void each(int64_t count, const Work& work, minivllm_parallel parallel, int64_t num_threads) {
  if (parallel == nullptr || num_threads == 1 || count < 2) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  Items<Work> items{work, count, std::max<int64_t>(1, count / (8 * num_threads))};
  parallel(Items<Work>::run, &items, num_threads, 0);
}

// Of `count`, cut into as few equal parts as hold at most `most` each: how many are in one, a multiple of `step`.
inline int64_t part_of(int64_t count, int64_t most, int64_t step = 1) {
  const int64_t parts = std::max<int64_t>(1, (count + most - 1) / most);
  return ((count + parts - 1) / parts + step - 1) / step * step;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// `count` sums of a token, from `output` on, into y [tokens][outputs]; the bias is added, null: there is none.
inline void write_sums(const float* bias, int64_t outputs, int64_t token, int64_t output, float* sums, int64_t count, void* y,
                       bool bf16) {
  if (bias != nullptr)
    for (int64_t n = 0; n < count; n++) sums[n] += bias[output + n];
  const int64_t at = token * outputs + output;
  if (!bf16) std::memcpy(static_cast<float*>(y) + at, sums, 4 * count);
  else
    for (int64_t n = 0; n < count; n++) static_cast<uint16_t*>(y)[at + n] = to_bf16(sums[n]);
}

}  // namespace minivllm
