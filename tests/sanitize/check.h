// What the checks share. Each is a program of its own: one kernel's library on random inputs in heap allocations of
// exactly their size, against plain loops. `make sanitize` runs them under AddressSanitizer and UBSan, under
// ThreadSanitizer, and for other instruction sets than this machine's best.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

inline std::mt19937 rng(1);
inline int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
inline float normal() { return std::normal_distribution<float>()(rng); }

// GOMP_parallel's contract out of plain threads: OpenMP's own runtime is not instrumented.
inline void parallel(void (*work)(void*), void* data, unsigned num_threads, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < num_threads; i++) threads.emplace_back(work, data);
  work(data);
  for (auto& thread : threads) thread.join();
}

inline int num_cases(int argc, char** argv) { return argc > 1 ? std::atoi(argv[1]) : 200; }

// Elements of float32 or bfloat16 in memory of exactly their size.
struct Values {
  bool bf16;
  std::vector<uint8_t> bytes;

  Values(bool bf16, int64_t count) : bf16(bf16), bytes(count * (bf16 ? 2 : 4)) {}
  void set(int64_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (bf16) std::memcpy(&bytes[2 * i], &half, 2);
    else std::memcpy(&bytes[4 * i], &x, 4);
  }
  float get(int64_t i) const {
    uint32_t bits = 0;
    if (bf16) std::memcpy(reinterpret_cast<char*>(&bits) + 2, &bytes[2 * i], 2);
    else std::memcpy(&bits, &bytes[4 * i], 4);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  void fill_normal(float scale = 1) {
    for (size_t i = 0; i < bytes.size() / (bf16 ? 2 : 4); i++) set(i, scale * normal());
  }
  double unit() const { return bf16 ? 0x1p-8 : 0x1p-24; }
};
