// Threads that stay together for a whole call. A decode step is some two hundred short pieces of work for all threads, and
// OpenMP's way to begin and end one costs as much as the piece where its threads have gone to sleep in between, as they
// do when a process has several pools of them. Here they wait for the next piece awake, in one parallel region.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "attention.h"

namespace minivllm {

class Team {
 public:
  // body() in the calling thread, in which `parallel` below then hands work to up to num_threads threads.
  template <typename Body>
  static void with(minivllm_parallel outer, int64_t num_threads, const Body& body) {
    if (outer == nullptr) return body();
    Call<Body> call{{}, std::this_thread::get_id(), body};
    outer(Call<Body>::run, &call, num_threads, 0);
  }

  // As OpenMP's: work(data) in every thread of the team that is there.
  static void parallel(void (*work)(void*), void* data, unsigned, unsigned) { current->share(work, data); }

 private:
  template <typename Body>
  struct Call;

  static inline thread_local Team* current = nullptr;

  std::atomic<uint64_t> piece{0};  // odd: work is handed out; the last bit set: the end
  std::atomic<int64_t> active{0};  // threads that may be looking at it
  void (*work)(void*) = nullptr;
  void* data = nullptr;

  static constexpr uint64_t END = uint64_t(1) << 63;

  void share(void (*work_)(void*), void* data_) {
    work = work_, data = data_;
    piece.fetch_add(1);  // who comes from now on takes part
    work(data);
    piece.fetch_add(1);  // and from now on not any more
    // Whoever took part counted itself before it looked at `piece` once more, so it is seen here.
    for (int64_t spins = 0; active.load() != 0; spins++) wait(spins);
  }

  void help() {
    uint64_t done = 0;
    for (int64_t spins = 0;; spins++) {
      const uint64_t now = piece.load();
      if (now & END) return;
      if (now % 2 == 0 || now == done) {
        wait(spins);
        continue;
      }
      active.fetch_add(1);
      if (piece.load() == now) work(data);
      active.fetch_sub(1);
      done = now;
      spins = 0;
    }
  }

  static void wait(int64_t spins) {
    if (spins > 1 << 14) return std::this_thread::yield();  // more threads than cores
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

template <typename Body>
struct Team::Call {
  Team team;
  std::thread::id caller;
  const Body& body;

  static void run(void* data) {
    Call& call = *static_cast<Call*>(data);
    if (std::this_thread::get_id() != call.caller) return call.team.help();
    Team* const before = current;
    current = &call.team;
    call.body();
    current = before;
    call.team.piece.fetch_or(END);
  }
};

}  // namespace minivllm
