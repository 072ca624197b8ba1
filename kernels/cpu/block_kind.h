// Between block_linear.cpp, which is compiled once, and block_kind.cpp, which is compiled for each kind of block that is
// used: twelve kinds at once would take the compiler half a minute.
#pragma once

#include <cstdint>

extern "C" {

// The OpenMP runtime's GOMP_parallel, the one that torch uses; null: everything in the calling thread.
typedef void (*minivllm_parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

// All tokens' inputs as integers of 16 or 8 bits (block_tiles.h: to_integers), 32 of them a unit.
struct minivllm_integers {
  int8_t* q;      // [tokens][units][unit_bytes]
  float* scales;  // [tokens][units][4]: the scale, then times it the sum of all of q, and of each half of it
  int32_t* sums;  // [tokens][units][2]: of each half of q
  int64_t units;
};

// sums [count][num_tiles][8]: `count` tokens from `first` on times num_tiles neighbouring tiles from `tile` on: at most 2
// of them where there are more than FEW tokens.
typedef void (*minivllm_multiply)(const minivllm_integers* x, const uint8_t* tiles, int64_t tile, int64_t num_tiles,
                                  int64_t first, int64_t count, float* sums);
}

namespace minivllm {

constexpr int OUTPUTS = 8, UNIT = 32;  // outputs of a tile; inputs that share a scale of x
constexpr int unit_bytes(int bits) { return UNIT * bits / 8; }  // of q, in whichever form
constexpr int FEW = 4;                 // tokens up to which codes are widened in registers, and no panel is made
constexpr int GROUP = 6;               // tokens that share a pass over a panel

}  // namespace minivllm
