// The whole stack in one call, over packed weights or tiles and paged attention: any number of threads gives what one
// thread gives, so with tiles many tokens in blocks what they give product by product. What that is, tests/attention and
// tests/runner compare with the model as written.
#include "../../kernels/cpu/decoder.cpp"
#include "check.h"

extern "C" {  // packed_linear.cpp
struct minivllm_matrix {
  const uint8_t* weight;
  const float* bias;
  int64_t outputs, inputs, bits;
};
int64_t minivllm_packed_bytes(int64_t outputs, int64_t inputs, int64_t bits);
int64_t minivllm_best_path();
void minivllm_linear(const minivllm_matrix* matrix, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                     int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads);
// dense_linear.cpp
int64_t minivllm_dense_unit();
int64_t minivllm_dense_bytes(const minivllm_dense* matrix);
void minivllm_dense_pack(const minivllm_dense* matrix, const void* weight, void* to, minivllm_parallel parallel,
                         int64_t num_threads);
void minivllm_dense_linear(const minivllm_dense* matrix, const void* x, void* y, int64_t tokens, int64_t, int64_t y_bf16,
                           int64_t, minivllm_parallel parallel, int64_t num_threads);
}

namespace {

struct Model {
  bool bf16, dense;
  std::vector<std::vector<uint8_t>> weights;
  std::vector<std::unique_ptr<Values>> vectors;
  std::vector<std::vector<float>> norms;
  std::vector<std::unique_ptr<minivllm_matrix>> matrices;
  std::vector<std::unique_ptr<minivllm_dense>> tiles;

  const void* vector(int64_t count, float mean, float scale) {
    vectors.push_back(std::make_unique<Values>(bf16, count));
    for (int64_t i = 0; i < count; i++) vectors.back()->set(i, mean + scale * normal());
    return vectors.back()->bytes.data();
  }
  const float* norm(int64_t count) {
    norms.emplace_back(count);
    for (float& weight : norms.back()) weight = 1 + 0.1f * normal();
    return norms.back().data();
  }
  const minivllm_matrix* matrix(int64_t outputs, int64_t inputs, int64_t halves = 0) {
    if (dense) {
      tiles.push_back(std::make_unique<minivllm_dense>(nullptr, nullptr, outputs, inputs, halves));
      weights.emplace_back(minivllm_dense_bytes(tiles.back().get()));
      minivllm_dense_pack(tiles.back().get(), vector(outputs * inputs, 0, 0.1f), weights.back().data(), parallel, 1);
      tiles.back()->weight = weights.back().data();
      return (const minivllm_matrix*)tiles.back().get();
    }
    std::vector<uint8_t> packed(minivllm_packed_bytes(outputs, inputs, 4));
    for (size_t block = 0; block < packed.size(); block += 320) {  // 256 bytes of codes, 16 scales, 16 minima
      for (int i = 0; i < 256; i++) packed[block + i] = rng();
      for (int i = 0; i < 32; i++) {
        const uint16_t half = i < 16 ? 0x2000 : 0xac00;  // 2^-7, and -2^-4: about -8 scales
        std::memcpy(&packed[block + 256 + 2 * i], &half, 2);
      }
    }
    weights.push_back(std::move(packed));
    matrices.push_back(std::make_unique<minivllm_matrix>(weights.back().data(), nullptr, outputs, inputs, 4));
    return matrices.back().get();
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  for (int c = 0; c < cases; c++) {
    const int64_t kv_heads = draw(1, 2), heads = kv_heads * draw(1, 3), size = 16 * draw(1, 3) * 2, block_size = 1 << draw(0, 5);
    const int64_t hidden = 32 * draw(1, 3), intermediate = 32 * draw(1, 4), num_layers = draw(1, 3), vocab = 20;
    const bool bf16 = draw(0, 1);
    Model model{bf16, bf16 && minivllm_dense_unit() && draw(0, 1)};
    const int64_t kind = bf16 ? 2 : 0, tokens = draw(0, model.dense ? 2 : 5) == 0 ? draw(128, 600) : draw(1, 40);
    const int64_t width = (heads + 2 * kv_heads) * size;
    void* layout = minivllm_layout(kv_heads, size, block_size, kind);
    const int64_t num_blocks = (tokens + block_size - 1) / block_size;
    const size_t kv_bytes = num_blocks * kv_heads * minivllm_page_bytes(layout);
    const bool qk_norm = draw(0, 1), post_norms = draw(0, 1), pre_norms = !post_norms || draw(0, 1);
    const int64_t rotary_half = size / (draw(0, 1) ? 2 : 4), unrotated = draw(0, 1) ? draw(0, 2) : -1;
    const int64_t table = tokens * rotary_half, window = draw(0, 1) * draw(1, 30);
    const minivllm_product product = model.dense ? (minivllm_product)minivllm_dense_linear : minivllm_linear;
    std::vector<minivllm_layer> layers;
    for (int64_t i = 0; i < num_layers; i++)
      layers.push_back({pre_norms ? model.norm(hidden) : nullptr, pre_norms ? model.norm(hidden) : nullptr, post_norms ? model.norm(hidden) : nullptr,
                        post_norms ? model.norm(hidden) : nullptr, qk_norm ? model.norm((heads + kv_heads) * size) : nullptr,
                        i == unrotated ? nullptr : model.vector(table, 0, 0.5f),
                        i == unrotated ? nullptr : model.vector(table, 0, 0.5f), model.matrix(width, hidden),
                        model.matrix(hidden, heads * size), model.matrix(2 * intermediate, hidden, 1),
                        model.matrix(hidden, intermediate), nullptr, i % 2, 0, {product, product, product, product}, {}});
    const void* rows = model.vector(vocab * hidden, 0, 1);
    minivllm_decoder decoder{layers.data(), model.norm(hidden), num_layers, hidden, heads, kv_heads, size, intermediate,
                             kind, draw(0, 1), draw(0, 1), draw(0, 1), rotary_half, draw(0, 1), 1e-5f, draw(0, 1) ? 1.0f : 0.3f,
                             draw(0, 1) ? 1.0f : 8.0f,
                             minivllm_best_path(), model.dense, minivllm_attend, nullptr, parallel};
    std::vector<int64_t> ids(tokens), positions(tokens);
    std::vector<int32_t> blocks(num_blocks), starts{0, int32_t(tokens)}, lens{int32_t(tokens)};
    for (int64_t i = 0; i < tokens; i++) {
      ids[i] = draw(0, vocab - 1);
      positions[i] = i;
    }
    for (int64_t i = 0; i < num_blocks; i++) blocks[i] = i;
    const float scale = 1 / std::sqrt(float(size)), soft_cap = draw(0, 1) * 20;
    const minivllm_view views[]{{int32_t(heads), 0, scale, soft_cap}, {int32_t(heads), int32_t(window), scale, soft_cap}};
    const minivllm_batch batch{starts.data(), lens.data(), blocks.data(), positions.data(), 1, int32_t(num_blocks),
                               int32_t(tokens), int32_t(tokens)};
    std::vector<uint8_t> first;
    for (int threads : {1, 2, 4}) {
      std::vector<std::unique_ptr<char[]>> caches;
      for (minivllm_layer& layer : layers) {
        caches.emplace_back(new char[kv_bytes]);
        std::memset(caches.back().get(), 0xff, kv_bytes);
        layer.kv = caches.back().get();
      }
      void* const plan = minivllm_plan(layout, views, 2, &batch);
      Values y(model.bf16, tokens * hidden);
      minivllm_decode(&decoder, tokens, threads, rows, ids.data(), positions.data(), &plan, nullptr, y.bytes.data());
      minivllm_plan_free(plan);
      for (int64_t i = 0; i < tokens * hidden; i++)
        if (!std::isfinite(y.get(i))) return std::printf("case %d, %d threads: not finite\n", c, threads), 1;
      if (threads == 1) first = y.bytes;
      else if (first != y.bytes) return std::printf("case %d: %d threads differ from one\n", c, threads), 1;
    }
    minivllm_layout_free(layout);
  }
  std::printf("decoder: %d random models\n", cases);
}
