// y = x W^T + bias with W in bfloat16 (dense.h): the product by itself, and how W is packed.
#include <atomic>
#include <memory>

#include "dense.h"
#include "items.h"

namespace {

using namespace minivllm;

typedef uint16_t bf16;
constexpr int64_t CACHED = 1 << 19;  // numbers of x and y that a thread works on at a time

// Items in a row, which all threads share: each begins with a part of its own, then helps the others.
struct Shared {
  int64_t count, threads;
  std::unique_ptr<std::atomic<int64_t>[]> next{new std::atomic<int64_t>[threads]};
  std::atomic<int64_t> arrived{0};

  Shared(int64_t count, int64_t threads) : count(count), threads(threads) {
    for (int64_t i = 0; i < threads; i++) next[i] = begin(i);
  }
  int64_t begin(int64_t part) const { return count * part / threads; }

  template <typename Work>
  void each(const Work& work) {
    const int64_t mine = arrived.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i = 0; i < threads; i++) {
      const int64_t part = (mine + i) % threads, end = begin(part + 1);
      for (int64_t item; (item = next[part].fetch_add(1, std::memory_order_relaxed)) < end;) work(item);
    }
  }
};

struct Packing {
  Panels panels;
  const bf16* from;
  char* to;
  Shared items;
};

void pack(void* data) {
  Packing& call = *static_cast<Packing*>(data);
  const Panels& panels = call.panels;
  call.items.each([&](int64_t p) {
    const Outputs outputs = panels.of(p);
    for (int64_t s = 0; s < panels.steps(); s++)
      for (int tile = 0; tile < 2; tile++) {
        char* to = call.to + p * panels.bytes() + s * STEP_BYTES + tile * STEP_BYTES / 2;
        if (outputs.size[tile] < SIDE) std::memset(to, 0, STEP_BYTES / 2);
        for (int64_t n = 0; n < outputs.size[tile]; n++) {
          const bf16* from = call.from + (outputs.first[tile] + n) * panels.w.inputs + s * STEP;
          for (int64_t pair = 0; pair < STEP / 2; pair++) std::memcpy(to + pair * 64 + n * 4, from + 2 * pair, 4);
        }
      }
  });
}

#ifdef MINIVLLM_DENSE

template <typename T, typename V>
inline void write(T* to, V values, int64_t size) {
  if (size == SIDE) store(to, values);  // a copy whose size is not known to the compiler takes far longer
  else std::memcpy(to, &values, size * sizeof(T));
}

struct Product {
  Panels panels;
  const bf16* x;
  void* y;
  int64_t tokens, rows;  // rows: of a block
  bool to_bf16;
  Shared items;
};

void multiply(void* data) {
  Product& call = *static_cast<Product*>(data);
  const Panels panels = call.panels;
  const int64_t num_panels = panels.count(), width = panels.w.outputs;
  const bool rounds = call.to_bf16;
  void* const y = call.y;
  int64_t configured = 0;
  call.items.each([&](int64_t item) {
    const int64_t p = item % num_panels, first = item / num_panels * call.rows;
    const int64_t rows = std::min(call.rows, call.tokens - first);
    if (const int64_t needed = std::min(rows, BLOCK); needed != configured) configure_dense(configured = needed);
    const Rows from{call.x + first * panels.w.inputs, panels.w.inputs, false};
    multiply_panel(panels, p, from, rows, [=](int64_t row, const Outputs& outputs, const float* both) {
      for (int tile = 0; tile < 2; tile++) {
        const int64_t at = (first + row) * width + outputs.first[tile], size = outputs.size[tile];
        const Floats sums = load<Floats>(both + tile * SIDE);
        if (rounds) write((bf16*)y + at, to_bf16(sums), size);
        else write((float*)y + at, sums, size);
      }
    });
  });
  release_dense();
}

#endif

// The OpenMP runtime's GOMP_parallel, the one that torch uses; null: everything in the calling thread.
typedef void (*Parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

}  // namespace

extern "C" {

// What multiplies in this build and this process: 2 the matrix unit, 1 the vector unit, 0 nothing. All can pack.
int64_t minivllm_dense_unit() {
#ifdef MINIVLLM_DENSE
  return on_tiles() ? 2 : 1;
#else
  return 0;
#endif
}

int64_t minivllm_dense_bytes(const minivllm_dense* matrix) {
  const Panels panels{*matrix};
  return panels.count() * panels.bytes();
}

// weight: bf16 [outputs][inputs]. to: minivllm_dense_bytes, all of them written; what becomes the matrix's weight.
void minivllm_dense_pack(const minivllm_dense* matrix, const void* weight, void* to, Parallel parallel,
                         int64_t num_threads) {
  if (parallel == nullptr) num_threads = 1;
  const Panels panels{*matrix};
  Packing call{panels, (const bf16*)weight, (char*)to, {panels.count(), num_threads}};
  num_threads == 1 ? pack(&call) : parallel(pack, &call, num_threads, 0);
}

// y [tokens, outputs], bf16 or fp32, = x [tokens, inputs] W^T + bias; both dense, x in bf16. As decoder.cpp's
// minivllm_product, whose other arguments are of packed weights. Only where minivllm_dense_unit is not 0.
void minivllm_dense_linear(const minivllm_dense* matrix, const void* x, void* y, int64_t tokens, int64_t, int64_t y_bf16,
                           int64_t, Parallel parallel, int64_t num_threads) {
#ifdef MINIVLLM_DENSE
  if (tokens == 0) return;
  if (parallel == nullptr) num_threads = 1;
  const Panels panels{*matrix};
  const int64_t most = std::clamp<int64_t>(CACHED / (matrix->inputs + matrix->outputs), BLOCK, ROWS);
  const int64_t rows = part_of(tokens, most, BLOCK), num_blocks = (tokens + rows - 1) / rows;
  Product call{panels, (const bf16*)x, y, tokens, rows, y_bf16 != 0, {num_blocks * panels.count(), num_threads}};
  num_threads == 1 ? multiply(&call) : parallel(multiply, &call, num_threads, 0);
#endif
}

}  // extern "C"
