// Whether this build and this process may use Intel's matrix unit (AMX).
#pragma once

#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MINIVLLM_AMX 1

namespace minivllm {

// The kernel grants the tiles' state to a process that asks (Linux 5.16).
inline bool amx_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void load() const {
    // The tile intrinsics do not tell the compiler that they read memory: what was stored before must be in place.
    asm volatile("" ::: "memory");
    _tile_loadconfig(this);
  }
};

}  // namespace minivllm
#endif
