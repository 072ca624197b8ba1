// Absorbed latent attention: vectors of any size and dtype, scattered blocks, several heads a task, against plain loops.
#include "../../kernels/cpu/latent.cpp"
#include "check.h"

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const bool bf16 = draw(0, 1);
    const int64_t rank = draw(1, 70), size = rank + draw(0, 20), block = draw(1, 20), width = draw(1, 8), heads = draw(1, 15);
    const int64_t requests = draw(1, 3), queries = draw(1, 5), num_blocks = requests * width;
    std::vector<int32_t> tables(num_blocks), owners(queries), limits(queries);
    for (int64_t i = 0; i < num_blocks; i++) tables[i] = int32_t(i);
    std::shuffle(tables.begin(), tables.end(), rng);
    for (int32_t& owner : owners) owner = draw(0, requests - 1);
    for (int32_t& limit : limits) limit = draw(1, width * block);
    Values cache(bf16, num_blocks * block * size);
    cache.fill_normal();
    std::vector<float> q(queries * heads * size), out(queries * heads * rank, NAN);
    for (float& x : q) x = normal();
    const float scale = 0.1f;
    const minivllm::Latents of{cache.bytes.data(), tables.data(), owners.data(), limits.data(), q.data(), out.data(), width, block,
                               size, rank, heads, queries, draw(1, heads), scale, bf16 ? minivllm::BF16 : minivllm::F32};
    minivllm_latent(&of, parallel, draw(1, 4));
    for (int64_t row = 0; row < queries * heads; row++) {
      const int64_t query = row / heads;
      std::vector<double> weights(limits[query]), wanted(rank);
      double sum = 0;
      const auto at = [&](int64_t n) { return (tables[owners[query] * width + n / block] * block + n % block) * size; };
      for (int64_t n = 0; n < limits[query]; n++) {
        double score = 0;
        for (int64_t i = 0; i < size; i++) score += double(q[row * size + i]) * cache.get(at(n) + i);
        sum += weights[n] = std::exp(score * scale);
      }
      for (int64_t n = 0; n < limits[query]; n++)
        for (int64_t i = 0; i < rank; i++) wanted[i] += weights[n] / sum * cache.get(at(n) + i);
      for (int64_t i = 0; i < rank; i++) worst = std::max(worst, std::abs(out[row * rank + i] - wanted[i]));
      for (int64_t i = 0; i < rank; i++)
        if (!(std::abs(out[row * rank + i] - wanted[i]) < 2e-5))
          return std::printf("case %d: %g, not %g\n", c, out[row * rank + i], wanted[i]), 1;
    }
  }
  std::printf("latent attention: %d random batches, at most %.1e off\n", cases, worst);
}
