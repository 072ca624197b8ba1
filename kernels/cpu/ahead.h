// Asking for weights some KB before they are multiplied.
//
// Where a processor reads a single stream ahead by itself this is in its way, where it does not it is a third to a half
// of a product's time (bench/LOG.md, 2026-11-28). No instruction set tells which: the maker does, by build.py.
#pragma once

#include <cstdint>

namespace minivllm {

#ifdef MINIVLLM_INTEL  // Sapphire Rapids, on a virtual machine: half of memory's rate by itself
constexpr bool READS_AHEAD = false;
#else  // AMD's Zen 4: memory's rate. Others were not measured.
constexpr bool READS_AHEAD = true;
#endif

enum Level : int { FIRST_LEVEL = 3, SECOND_LEVEL = 2 };  // of the cache, as __builtin_prefetch counts

// Every 64 bytes of the `bytes` from `from` on, which need not be there.
template <Level LEVEL>
inline void ask_for(const void* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(from) + line, 0, LEVEL);
}

}  // namespace minivllm
