// The instruction that multiplies bfloat16, with nothing else in its way: no program is faster on these cores.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "../kernels/cpu/dense.h"

namespace {
using namespace minivllm;

constexpr int64_t BURSTS = 500;  // of some 0.2 ms: most are left alone on a busy machine

// The best burst's floating-point operations a second; burst() gives how many it made.
template <typename Burst>
void measure(std::atomic<double>& total, const Burst& burst) {
  double best = 0;
  for (int64_t i = 0; i < BURSTS; i++) {
    const auto begin = std::chrono::steady_clock::now();
    const double flops = burst();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, flops / seconds.count());
  }
  total.fetch_add(best);
}

#ifdef MINIVLLM_DENSE_TILES
double tiles() {
  constexpr int64_t rounds = 10'000;
  for (int64_t i = 0; i < rounds; i++) {  // four sums: none waits for the one before it
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return rounds * 4 * 2.0 * 16 * 16 * 32;
}
#endif

#ifdef MINIVLLM_DENSE
double vectors() {
  constexpr int64_t rounds = 40'000, sums = 16;
  Words x = splat_word(0), w = splat_word(0);
  Floats acc[sums] = {};
  for (Floats& sum : acc) asm volatile("" : "+v"(sum));  // as if they differed
  for (int64_t i = 0; i < rounds; i++) {
    asm volatile("" : "+v"(x), "+v"(w));  // as if both were new
#pragma GCC unroll 16
    for (int64_t s = 0; s < sums; s++) acc[s] = dot_bf16(acc[s], x, w);
  }
  for (Floats& sum : acc) asm volatile("" : "+v"(sum));
  return rounds * sums * 2.0 * 2 * LANES;
}

void run(void* data) {
  auto& total = *static_cast<std::atomic<double>*>(data);
#ifdef MINIVLLM_DENSE_TILES
  if (on_tiles()) {
    configure_dense(BLOCK);  // all tiles are 0 then
    measure(total, tiles);
    release_dense();
    return;
  }
#endif
  measure(total, vectors);
}
#endif
}  // namespace

// Floating-point operations a second of all threads at once: the sum of each one's best. parallel: GOMP_parallel.
extern "C" double peak(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int64_t threads) {
  std::atomic<double> total{0};
#ifdef MINIVLLM_DENSE
  parallel(run, &total, threads, 0);
#endif
  return total;
}
