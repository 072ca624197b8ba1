// y = x W^T with W as blocks of a GGUF file, kept in tiles (block_tiles.h): inputs become integers once for the whole
// product, then threads take tiles, or pairs of them. Many tokens go by in blocks whose inputs stay in the second-level
// cache. What a kind of block needs is in block_kind.cpp.

#include <vector>

#include "block_tiles.h"
#include "items.h"

namespace {

using namespace minivllm;

constexpr int64_t X_BYTES = 256 << 10;  // of integers that stay in the second-level cache
constexpr int64_t MOST_TOKENS = 510;    // of a block of them
constexpr int64_t ALONE = 512;          // units: fewer are not worth waking a thread for
constexpr int64_t RUN = 4;              // tiles of an item of few tokens

}  // namespace

extern "C" {

struct minivllm_blocks_part {
  const uint8_t* tiles;  // as minivllm_kind_pack gave them
  minivllm_multiply multiply;
  int64_t rows;
};

struct minivllm_blocks {
  const minivllm_blocks_part* parts;  // one above the other
  int64_t num_parts;
  const float* bias;  // [outputs], or null
  int64_t outputs, inputs;
  int64_t bits;  // of the integers that inputs become, 16 or 8: those of all parts' `multiply`
};
}

namespace {

// Where a part's items of `size` neighbouring tiles are among those of all parts.
struct Place {
  const minivllm_blocks_part* part;
  int64_t output, tile, num_tiles;  // the part's first output; the first tile, and how many
};

inline int64_t items_of(const minivllm_blocks_part& part, int64_t size) {
  return (part.rows + size * OUTPUTS - 1) / (size * OUTPUTS);
}

inline Place place_of(const minivllm_blocks& w, int64_t item, int64_t size) {
  int64_t output = 0;
  const minivllm_blocks_part* part = w.parts;
  for (; item >= items_of(*part, size); part++) {
    item -= items_of(*part, size);
    output += part->rows;
  }
  const int64_t tiles = items_of(*part, 1);
  return {part, output, item * size, std::min(size, tiles - item * size)};
}

template <int BITS>
void token_to_integers(const void* x, bool bf16, int64_t token, const minivllm_integers& to) {
  for (int64_t u = 0; u < to.units; u++) {
    const int64_t at = token * to.units + u;
    float values[UNIT];
    const float* from = values;
    if (bf16)
      for (int k = 0; k < UNIT; k++) values[k] = from_bf16(static_cast<const uint16_t*>(x)[at * UNIT + k]);
    else from = static_cast<const float*>(x) + at * UNIT;
    to_integers<BITS>(from, {to.q + at * unit_bytes(BITS), to.scales + 4 * at, to.sums + 2 * at});
  }
}

}  // namespace

extern "C" {

// What the products run on: 0 plain loops, 1 AVX2, 2 AVX-VNNI or AVX-512 VNNI in 256 bits, 3 ARM sdot, 4 ARM i8mm.
int64_t minivllm_blocks_unit() {
#if defined(MINIVLLM_BLOCKS_X86)
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
  return 2;
#else
  return 1;
#endif
#elif defined(MINIVLLM_BLOCKS_ARM)
#ifdef __ARM_FEATURE_MATMUL_INT8
  return 4;
#else
  return 3;
#endif
#else
  return 0;
#endif
}

// y [tokens, outputs] = x [tokens, inputs] W^T + bias; each of x and y dense, bf16 or fp32. `path` is another library's.
void minivllm_blocks_linear(const minivllm_blocks* w, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                            int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads) {
  // The calling thread keeps the memory.
  static thread_local std::vector<int8_t> q;
  static thread_local std::vector<float> scales;
  static thread_local std::vector<int32_t> sums_of_x;
  const int64_t units = w->inputs / UNIT, all = tokens * units, bytes = unit_bytes(w->bits);
  q.resize(std::max<int64_t>(q.size(), all * bytes));
  scales.resize(std::max<int64_t>(scales.size(), 4 * all));
  sums_of_x.resize(std::max<int64_t>(sums_of_x.size(), 2 * all));
  const minivllm_integers integers{q.data(), scales.data(), sums_of_x.data(), units};
  const auto convert = w->bits == 8 ? token_to_integers<8> : token_to_integers<16>;
  each(tokens, [&](int64_t t) { convert(x, x_bf16, t, integers); }, all < ALONE ? nullptr : parallel, num_threads);

  const int64_t size = tokens > FEW ? 2 : RUN;  // tiles of an item
  const int64_t in_cache = std::clamp<int64_t>(X_BYTES / (units * bytes) / GROUP * GROUP, GROUP, MOST_TOKENS);
  const int64_t block = tokens > FEW ? part_of(tokens, in_cache, GROUP) : FEW, blocks = (tokens + block - 1) / block;
  int64_t items = 0;
  for (int64_t p = 0; p < w->num_parts; p++) items += items_of(w->parts[p], size);
  auto multiply = [&](int64_t i) {
    const int64_t first = i / items * block, count = std::min(block, tokens - first);
    const Place place = place_of(*w, i % items, size);
    const int64_t width = place.num_tiles * OUTPUTS, row = place.tile * OUTPUTS;
    const int64_t outputs = std::min(width, place.part->rows - row);
    auto into = [&](float* sums) {
      place.part->multiply(&integers, place.part->tiles, place.tile, place.num_tiles, first, count, sums);
      for (int64_t t = 0; t < count; t++) write_sums(w->bias, w->outputs, first + t, place.output + row, sums + t * width, outputs, y, y_bf16);
    };
    if (tokens <= FEW) {
      float few[FEW * RUN * OUTPUTS];
      return into(few);
    }
    static thread_local std::vector<float> many;
    many.resize(std::max<int64_t>(many.size(), count * width));
    into(many.data());
  };
  each(items * blocks, multiply, parallel, num_threads);
}

}  // extern "C"
