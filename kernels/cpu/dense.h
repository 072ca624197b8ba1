// y = x W^T with W in bfloat16 on Intel's matrix unit (AMX): 16 rows x 16 columns x 32 terms an instruction.
//
// Layout (`minivllm_dense_pack`): W is cut into panels of 32 outputs, a panel into steps of 32 inputs, and a step is two
// tiles side by side, [16 pairs of inputs][16 outputs] words of two bf16. So a panel is read from front to back, and
// 32 rows of x meet it in four sums that stay in the unit. The two tiles of a panel are neighbours in W, or, where W is
// two matrices one above the other (gate and up), the same outputs of both: who has one then has the other too.
//
// A sum is taken input by input in one order, whatever the number of rows: a row of y depends on its row of x alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx_permission.h"

#if defined(MINIVLLM_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MINIVLLM_DENSE 1
#endif

extern "C" {

struct minivllm_dense {
  const void* weight;  // as minivllm_dense_pack gave it
  const float* bias;   // [outputs], or null
  int64_t outputs, inputs;  // inputs: a multiple of 32
  int64_t halves;           // 1: a panel's tiles are of W's first and second half
};
}

namespace minivllm {

constexpr int64_t SIDE = 16, STEP = 32;      // outputs of a tile, inputs of a step
constexpr int64_t STEP_BYTES = 2 * 16 * 64;  // of weights
constexpr int64_t BLOCK = 32;                // rows of x that share a pass over a panel
constexpr int64_t ROWS = 256;                // rows that a thread takes at a time: they stay in its second-level cache
constexpr int64_t L1_STEPS = 9;

// Where the sums of a panel's two tiles belong: the first output of each, and how many there are.
struct Outputs {
  int64_t first[2], size[2];
};

struct Panels {
  minivllm_dense w;

  int64_t half() const { return w.halves ? w.outputs / 2 : w.outputs; }
  int64_t width() const { return w.halves ? SIDE : 2 * SIDE; }  // outputs of a half that a panel has
  int64_t count() const { return (half() + width() - 1) / width(); }
  int64_t steps() const { return w.inputs / STEP; }
  int64_t bytes() const { return steps() * STEP_BYTES; }
  Outputs of(int64_t panel) const {
    const int64_t begin = panel * width(), next = begin + (w.halves ? half() : SIDE);
    const int64_t left = half() - begin, next_left = w.outputs - next;
    return {{begin, next}, {std::min(left, SIDE), std::clamp<int64_t>(next_left, 0, SIDE)}};
  }
};

#ifdef MINIVLLM_DENSE

// For blocks of `rows` <= BLOCK rows. Tiles 0-3 are sums, 4 and 5 rows of x, 6 and 7 weights.
inline void configure_dense(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    const bool second = i == 2 || i == 3 || i == 5;
    config.row_bytes[i] = 64;
    config.rows[i] = i >= 6 ? SIDE : std::clamp<int64_t>(second ? rows - SIDE : rows, 1, SIDE);
  }
  config.load();
}

// Rows of x. Dense, or in squares of BLOCK rows x STEP inputs that lie one after another, a row of squares before the
// next: what is multiplied then lies together, and takes a third less time to be fetched from the second-level cache.
struct Rows {
  const uint16_t* x;
  int64_t inputs;
  bool squares;

  int64_t stride() const { return squares ? 2 * STEP : 2 * inputs; }  // bytes from row to row, of BLOCK
  int64_t step() const { return squares ? 2 * STEP * BLOCK : 2 * STEP; }
  const char* from(int64_t row, int64_t step_) const { return (const char*)(x + row * inputs) + step_ * step(); }
};
inline int64_t square_at(int64_t row, int64_t input, int64_t inputs) {
  return row / BLOCK * BLOCK * inputs + input / STEP * STEP * BLOCK + row % BLOCK * STEP + input % STEP;
}

// sums [BLOCK][2 tiles][SIDE] (+)= M x 16 rows, from `x` on, times `steps` steps of a panel. Asks for `lines` lines of
// the cache a step, from `ahead` on: what will be multiplied with next.
template <int M>
inline void multiply_block(const char* x, int64_t stride, int64_t step, const char* panel, int64_t steps, bool first,
                           float* sums, const char* ahead, int lines) {
  constexpr int row = 2 * SIDE * sizeof(float);
  asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read and write memory
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, row);
    _tile_loadd(1, sums + SIDE, row);
    if constexpr (M == 2) {
      _tile_loadd(2, sums + SIDE * 2 * SIDE, row);
      _tile_loadd(3, sums + SIDE * 2 * SIDE + SIDE, row);
    }
  }
  for (int64_t s = 0; s < steps; s++, x += step, panel += STEP_BYTES) {
    for (int i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + STEP_BYTES / 2, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (M == 2) {
      _tile_loadd(5, x + SIDE * stride, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, row);
  _tile_stored(1, sums + SIDE, row);
  if constexpr (M == 2) {
    _tile_stored(2, sums + SIDE * 2 * SIDE, row);
    _tile_stored(3, sums + SIDE * 2 * SIDE + SIDE, row);
  }
  asm volatile("" ::: "memory");
}

// use(row, outputs, their sums [2][SIDE], the bias added) for `count` <= ROWS rows. Where they are no multiple of BLOCK
// and more than one, some rows come twice, with equal sums.
//
// A panel is met in parts of some L1_STEPS steps by all rows before its next part: the part, the rows' part and the sums
// are then in the first-level cache together. The next panel is asked for meanwhile, spread over the whole.
template <typename Use>
inline void multiply_panel(const Panels& panels, int64_t p, const Rows& rows, int64_t count, const Use& use) {
  alignas(64) float sums[ROWS * 2 * SIDE];
  const int64_t steps = panels.steps(), num_parts = (steps + L1_STEPS - 1) / L1_STEPS;
  const int64_t part = (steps + num_parts - 1) / num_parts, num_blocks = (count + BLOCK - 1) / BLOCK;
  const int lines = int((STEP_BYTES / 64 + num_blocks - 1) / num_blocks);
  const Outputs outputs = panels.of(p);
  const char *panel = (const char*)panels.w.weight + p * panels.bytes(), *ahead = panel + panels.bytes();
  for (int64_t begin = 0; begin < steps; begin += part) {
    const int64_t size = std::min(part, steps - begin);
    for (int64_t b = 0; b < num_blocks; b++, ahead += size * lines * 64) {
      const int64_t first = std::max<int64_t>(0, std::min(b * BLOCK, count - BLOCK)), height = std::min(BLOCK, count);
      float* to = sums + b * BLOCK * 2 * SIDE;
      auto multiply = height > SIDE ? multiply_block<2> : multiply_block<1>;
      multiply(rows.from(first, begin), rows.stride(), rows.step(), panel + begin * STEP_BYTES, size, begin == 0, to,
               ahead, lines);
      if (begin + size < steps) continue;
      for (int64_t row = 0; row < height; row++, to += 2 * SIDE) {
        if (panels.w.bias != nullptr)
          for (int tile = 0; tile < 2; tile++)
            for (int64_t i = 0; i < outputs.size[tile]; i++)
              to[tile * SIDE + i] += panels.w.bias[outputs.first[tile] + i];
        use(first + row, outputs, to);
      }
    }
  }
}

#endif

}  // namespace minivllm
