// y = x W^T with W in bfloat16: on Intel's matrix unit (AMX), 16 rows x 16 columns x 32 terms an instruction, or on
// the vector unit (AVX-512 BF16, AMD since Zen 4), 1 row x 16 columns x 2 terms. Both read the same layout.
//
// Layout (`minivllm_dense_pack`): W is cut into panels of 32 outputs, a panel into steps of 32 inputs, and a step is two
// tiles side by side, [16 pairs of inputs][16 outputs] words of two bf16. So a panel is read from front to back, and
// some rows of x meet it in sums that stay in the unit: 32 rows in four tiles, or 8 in sixteen vectors. The two tiles of
// a panel are neighbours in W, or, where W is two matrices one above the other (gate and up), the same outputs of both:
// who has one then has the other too.
//
// A sum is taken input by input in one order, whatever the number of rows: a row of y depends on its row of x alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx_permission.h"
#include "simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MINIVLLM_DENSE 1
#if defined(MINIVLLM_AMX) && defined(__AMX_BF16__)
#define MINIVLLM_DENSE_TILES 1
#endif
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

// On which of the two: the system has to allow tiles.
inline bool on_tiles() {
#ifdef MINIVLLM_DENSE_TILES
  return amx_allowed();
#else
  return false;
#endif
}

// Before and after blocks of `rows` <= BLOCK rows. Tiles 0-3 are sums, 4 and 5 rows of x, 6 and 7 weights.
inline void configure_dense(int64_t rows) {
#ifdef MINIVLLM_DENSE_TILES
  if (!on_tiles()) return;
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    const bool second = i == 2 || i == 3 || i == 5;
    config.row_bytes[i] = 64;
    config.rows[i] = i >= 6 ? SIDE : std::clamp<int64_t>(second ? rows - SIDE : rows, 1, SIDE);
  }
  config.load();
#endif
}
inline void release_dense() {
#ifdef MINIVLLM_DENSE_TILES
  if (on_tiles()) _tile_release();
#endif
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

// sums [BLOCK][2 tiles][SIDE] (+)= rows of x, from `x` on, times `steps` steps of a panel. Asks for `lines` lines of the
// cache a step, from `ahead` on: what will be multiplied with next.
struct Part {
  const char* x;
  int64_t stride, step;  // of x, in bytes
  const char* panel;
  int64_t steps;
  bool first;  // sums begin here
  float* sums;
  const char* ahead;
  int lines;
};

// M <= 8 rows on the vector unit. Each weight is used 2 M times when it has been loaded, each pair of x twice.
template <int M>
inline void multiply_vectors(Part part) {
  Floats sums[M][2] = {};
  if (!part.first)
    for (int m = 0; m < M; m++)
      for (int tile = 0; tile < 2; tile++) sums[m][tile] = load<Floats>(part.sums + (2 * m + tile) * SIDE);
  for (int64_t s = 0; s < part.steps; s++, part.x += part.step, part.panel += STEP_BYTES) {
    for (int i = 0; i < part.lines; i++, part.ahead += 64) _mm_prefetch(part.ahead, _MM_HINT_T1);
    for (int pair = 0; pair < STEP / 2; pair++) {
      const Words left = load<Words>(part.panel + pair * 64);
      const Words right = load<Words>(part.panel + STEP_BYTES / 2 + pair * 64);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const Words x = splat_word(load<uint32_t>(part.x + m * part.stride + pair * 4));
        sums[m][0] = dot_bf16(sums[m][0], x, left);
        sums[m][1] = dot_bf16(sums[m][1], x, right);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int tile = 0; tile < 2; tile++) store(part.sums + (2 * m + tile) * SIDE, sums[m][tile]);
}

inline void multiply_vectors(Part part, int64_t rows) {
  for (; rows >= 8; rows -= 8, part.x += 8 * part.stride, part.sums += 8 * 2 * SIDE, part.lines = 0)
    multiply_vectors<8>(part);
  switch (rows) {
    case 1: return multiply_vectors<1>(part);
    case 2: return multiply_vectors<2>(part);
    case 3: return multiply_vectors<3>(part);
    case 4: return multiply_vectors<4>(part);
    case 5: return multiply_vectors<5>(part);
    case 6: return multiply_vectors<6>(part);
    case 7: return multiply_vectors<7>(part);
  }
}

#ifdef MINIVLLM_DENSE_TILES

// M x 16 rows on the matrix unit.
template <int M>
inline void multiply_tiles(Part part) {
  auto [x, stride, step, panel, steps, first, sums, ahead, lines] = part;
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

#endif

// Of `rows` <= BLOCK rows; tiles take whole ones, 16 or 32.
inline void multiply_block(const Part& part, int64_t rows) {
#ifdef MINIVLLM_DENSE_TILES
  if (on_tiles()) return rows > SIDE ? multiply_tiles<2>(part) : multiply_tiles<1>(part);
#endif
  multiply_vectors(part, rows);
}

// use(row, outputs, their sums [2][SIDE], the bias added) for `count` <= ROWS rows. With tiles some rows come twice, with
// equal sums, where `count` is no multiple of BLOCK and there is more than one.
//
// A panel is met in parts of some L1_STEPS steps by all rows before its next part: the part, the rows' part and the sums
// are then in the first-level cache together. The next panel is asked for meanwhile, spread over the whole.
template <typename Use>
inline void multiply_panel(const Panels& panels, int64_t p, const Rows& rows, int64_t count, const Use& use) {
  alignas(64) float sums[ROWS * 2 * SIDE];
  const int64_t steps = panels.steps(), num_parts = (steps + L1_STEPS - 1) / L1_STEPS;
  const int64_t part = (steps + num_parts - 1) / num_parts, num_blocks = (count + BLOCK - 1) / BLOCK;
  const bool whole = on_tiles();
  const int lines = int((STEP_BYTES / 64 + num_blocks - 1) / num_blocks);
  const Outputs outputs = panels.of(p);
  const char *panel = (const char*)panels.w.weight + p * panels.bytes(), *ahead = panel + panels.bytes();
  for (int64_t begin = 0; begin < steps; begin += part) {
    const int64_t size = std::min(part, steps - begin);
    for (int64_t b = 0; b < num_blocks; b++, ahead += size * lines * 64) {
      const int64_t first = whole ? std::max<int64_t>(0, std::min(b * BLOCK, count - BLOCK)) : b * BLOCK;
      const int64_t height = std::min(BLOCK, count - first);
      float* to = sums + b * BLOCK * 2 * SIDE;
      multiply_block({rows.from(first, begin), rows.stride(), rows.step(), panel + begin * STEP_BYTES, size, begin == 0,
                      to, ahead, lines},
                     height);
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
