// y = x W^T + bias in float32, for CPUs that multiply nothing narrower. W stays in float32, float16 or bfloat16, whichever
// holds it exactly, and is widened in registers: where a product takes as long as its weights take to be read, half of
// the bytes are half of the time.
//
// W is cut into panels of PANEL outputs. A panel lies word by word, of all its outputs one word of W's adjacent inputs (one
// float32, or two of 16 bits): a vector of words becomes vectors of weights without a shuffle, and a panel is read from
// front to back. Some rows of x meet it in sums that stay in registers.
//
// A sum is taken input by input in one order, by fused multiplications and additions, whatever the number of rows: a row
// of y depends on its row of x alone, bit for bit. PyTorch's products do not promise that.
#include <vector>

#include "items.h"
#include "simd.h"

namespace {

using namespace minivllm;

constexpr int64_t PANEL = 32;             // outputs
constexpr int64_t PART_BYTES = 16 << 10;  // of a panel, which all rows meet before its next part: the first-level cache's
constexpr int64_t X_BYTES = 1 << 20;      // of rows that a thread takes at a time: with others' they fit the last cache
constexpr int64_t MOST_ROWS = 240;
constexpr int64_t ALONE = 1 << 16;  // products of two numbers: fewer are not worth waking a thread for

}  // namespace

extern "C" {

struct minivllm_floats {
  const void* weight;  // as minivllm_floats_pack gave it
  const float* bias;   // [outputs], or null
  int64_t outputs, inputs;
  int64_t kind;  // of the weights: 0 float32, 1 float16, 2 bfloat16 (then inputs is even)
};
}

namespace {

struct Panels {
  minivllm_floats w;

  int64_t count() const { return (w.outputs + PANEL - 1) / PANEL; }
  int64_t words() const { return w.inputs * item_size(Kind(w.kind)) / 4; }  // of a panel's output
  int64_t bytes() const { return words() * PANEL * 4; }
  int64_t width(int64_t panel) const { return std::min(PANEL, w.outputs - panel * PANEL); }
};

// sums [ROWS][PANEL] += x times `words` words of a panel, of which it takes NV vectors of outputs. x: rows that lie
// `stride` apart.
template <Kind K, int ROWS, int NV>
inline void multiply_tile(const float* x, int64_t stride, const uint32_t* panel, int64_t words, float* sums) {
  constexpr int PER = 4 / item_size(K);
  Floats sum[ROWS][NV];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) sum[m][j] = load<Floats>(sums + m * PANEL + j * LANES);
  for (int64_t w = 0; w < words; w++, panel += PANEL) {
    Words word[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) word[j] = load<Words>(panel + j * LANES);
#pragma GCC unroll 2
    for (int i = 0; i < PER; i++) {
      Floats weight[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) weight[j] = unpack<K>(word[j], i);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) sum[m][j] += weight[j] * x[m * stride + w * PER + i];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(sums + m * PANEL + j * LANES, sum[m][j]);
}

// sums [count][PANEL] += x times `words` words of a panel.
template <Kind K>
inline void multiply_part(const float* x, int64_t stride, int64_t count, const uint32_t* part, int64_t words, float* sums) {
  for_rows(int(count), [&]<int ROWS>(int m) {
    constexpr int NV = std::min<int>(WIDTH<ROWS>, PANEL / LANES);
    for (int64_t n = 0; n < PANEL; n += NV * LANES)
      multiply_tile<K, ROWS, NV>(x + m * stride, stride, part + n, words, sums + m * PANEL + n);
  });
}

// sums [count][PANEL] = `count` rows of x times a panel.
template <Kind K>
void multiply_panel(const Panels& panels, const uint32_t* panel, const float* x, int64_t count, float* sums) {
  constexpr int PER = 4 / item_size(K);
  // Widening a float16 takes several instructions: where many rows meet it, it is done before.
  const bool widens = K == F16 && count > 2 * MAX_ROWS, is_whole = count <= MAX_ROWS;
  const int64_t words = panels.words(), part = is_whole ? words : PART_BYTES / (widens ? PER : 1) / (PANEL * 4);
  std::fill_n(sums, count * PANEL, 0.0f);
  for (int64_t begin = 0; begin < words; begin += part, x += part * PER, panel += part * PANEL) {
    const int64_t size = std::min(part, words - begin);
    if (!widens) {
      multiply_part<K>(x, panels.w.inputs, count, panel, size, sums);
      continue;
    }
    alignas(64) float wide[PART_BYTES / 4];
    for (int64_t w = 0; w < size; w++)
      for (int i = 0; i < PER; i++)
        for (int64_t n = 0; n < PANEL; n += LANES)
          store(wide + (w * PER + i) * PANEL + n, unpack<K>(load<Words>(panel + w * PANEL + n), i));
    multiply_part<F32>(x, panels.w.inputs, count, (const uint32_t*)wide, size * PER, sums);
  }
}

}  // namespace

extern "C" {

int64_t minivllm_floats_bytes(const minivllm_floats* matrix) {
  const Panels panels{*matrix};
  return panels.count() * panels.bytes();
}

// weight: [outputs][inputs] of the matrix's kind. to: minivllm_floats_bytes; what becomes the matrix's weight.
void minivllm_floats_pack(const minivllm_floats* matrix, const void* weight, void* to, minivllm_parallel parallel,
                          int64_t num_threads) {
  const Panels panels{*matrix};
  const int64_t words = panels.words();
  each(panels.count(), [&](int64_t p) {
    uint32_t* panel = (uint32_t*)((char*)to + p * panels.bytes());
    for (int64_t n = 0; n < PANEL; n++) {
      const bool exists = n < panels.width(p);
      const char* from = (const char*)weight + (p * PANEL + n) * words * 4;
      for (int64_t w = 0; w < words; w++) panel[w * PANEL + n] = exists ? load<uint32_t>(from + w * 4) : 0;
    }
  }, parallel, num_threads);
}

// y [tokens, outputs] = x [tokens, inputs] W^T + bias; each of x and y dense, bf16 or fp32. `path` is another library's.
void minivllm_floats_linear(const minivllm_floats* matrix, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                            int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads) {
  static thread_local std::vector<float> wide;  // the calling thread's
  const Panels panels{*matrix};
  const int64_t inputs = matrix->inputs, num_panels = panels.count();
  const float* rows = (const float*)x;
  if (tokens * inputs * matrix->outputs < ALONE) parallel = nullptr;
  if (x_bf16) {
    wide.resize(std::max<size_t>(wide.size(), tokens * inputs));
    float* to = wide.data();
    each(tokens, [&](int64_t t) {
      for (int64_t k = t * inputs; k < (t + 1) * inputs; k++) to[k] = from_bf16(((const uint16_t*)x)[k]);
    }, parallel, num_threads);
    rows = to;
  }
  const int64_t fit = std::clamp<int64_t>(X_BYTES / (4 * inputs) / MAX_ROWS * MAX_ROWS, 2 * MAX_ROWS, MOST_ROWS);
  const int64_t blocks = (tokens + fit - 1) / fit;
  const auto multiply = matrix->kind == F32 ? multiply_panel<F32> : matrix->kind == F16 ? multiply_panel<F16> : multiply_panel<BF16>;
  each(blocks * num_panels, [&](int64_t i) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    const int64_t p = i % num_panels, first = i / num_panels * fit, count = std::min(fit, tokens - first);
    const auto* panel = (const uint32_t*)((const char*)matrix->weight + p * panels.bytes());
    multiply(panels, panel, rows + first * inputs, count, sums);
    for (int64_t m = 0; m < count; m++)
      write_sums(matrix->bias, matrix->outputs, first + m, p * PANEL, sums + m * PANEL, panels.width(p), y, y_bf16);
  }, parallel, num_threads);
}

}  // extern "C"
