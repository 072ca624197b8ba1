// The matrix unit's instruction with nothing else in its way: no program multiplies bfloat16 faster on these cores.
#include <atomic>
#include <chrono>
#include <cstdint>

#include "../kernels/cpu/amx_permission.h"

namespace {
constexpr double FLOPS = 2 * 16 * 16 * 32;                    // of an instruction
constexpr int64_t BURSTS = 500, INSTRUCTIONS = 4 * 10'000;    // 0.2 ms a burst: most are left alone on a busy machine

void multiply(void* total) {
  minivllm::TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  config.load();  // all tiles are 0 then
  double best = 0;
  for (int64_t burst = 0; burst < BURSTS; burst++) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < INSTRUCTIONS; i += 4) {  // four sums: none waits for the one before it
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const double rate = INSTRUCTIONS * FLOPS / seconds.count();
    if (rate > best) best = rate;
  }
  _tile_release();
  static_cast<std::atomic<double>*>(total)->fetch_add(best);
}
}  // namespace

// Floating-point operations a second of all threads at once: the sum of each one's best. parallel: GOMP_parallel.
extern "C" double peak(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int64_t threads) {
  std::atomic<double> total{0};
  if (minivllm::amx_allowed()) parallel(multiply, &total, threads, 0);
  return total;
}
