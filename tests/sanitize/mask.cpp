// Grammars' masks: every bit, of vocabularies that end inside of a word, for some of the rows.
#include "../../kernels/cpu/mask.cpp"
#include "check.h"

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  for (int c = 0; c < cases; c++) {
    const int64_t vocab = draw(1, 300), words = (vocab + 31) / 32, num_rows = draw(1, 9);
    std::vector<float> logits(num_rows * vocab);
    for (float& x : logits) x = normal();
    const std::vector<float> before = logits;
    std::vector<int64_t> rows;
    for (int64_t row = num_rows - 1; row >= 0; row--)
      if (draw(0, 3)) rows.push_back(row);
    std::vector<uint32_t> masks(rows.size() * words);
    for (uint32_t& mask : masks) mask = draw(0, 2) ? (draw(0, 1) ? 0u : ~0u) : uint32_t(rng());
    minivllm_mask(logits.data(), rows.data(), masks.data(), vocab, words, rows.size(), parallel, draw(1, 4));
    for (int64_t row = 0; row < num_rows; row++) {
      const size_t at = std::find(rows.begin(), rows.end(), row) - rows.begin();
      for (int64_t i = 0; i < vocab; i++) {
        const bool allowed = at == rows.size() || masks[at * words + i / 32] >> i % 32 & 1;
        const float wanted = allowed ? before[row * vocab + i] : -std::numeric_limits<float>::infinity();
        if (logits[row * vocab + i] != wanted) return std::printf("row %d, token %d of %d\n", int(row), int(i), int(vocab)), 1;
      }
    }
  }
  std::printf("masks: %d random batches\n", cases);
}
