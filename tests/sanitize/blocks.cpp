// Products with one kind of a GGUF file's blocks (MINIVLLM_KIND) on this machine's path, or on the emulated one's, against
// plain loops in double over integers of the same rounding; a row's bits beside others and alone; rows of the file.
#include "../../kernels/cpu/block_kind.cpp"
#include "../../kernels/cpu/block_linear.cpp"
#include "check.h"

namespace {

// Random bytes, but for the floats of each block.
std::vector<uint8_t> random_rows(int64_t rows, int64_t inputs) {
  const int64_t blocks = rows * inputs / FORMAT.block;
  std::vector<uint8_t> raw(blocks * FORMAT.bytes);
  for (uint8_t& byte : raw) byte = rng();
  constexpr bool at_end = KIND == BlockKind::Q2_K || KIND == BlockKind::Q3_K || KIND == BlockKind::Q6_K;
  for (int64_t b = 0; b < blocks; b++)
    for (int i = 0; i < (FORMAT.minima ? 2 : 1); i++) {
      const uint16_t h = draw(5, 12) << 10 | draw(0, 1023) | draw(0, 1) << 15;
      const int at = at_end ? FORMAT.bytes - (FORMAT.minima ? 4 : 2) + 2 * i : 2 * i;
      std::memcpy(&raw[b * FORMAT.bytes + at], &h, 2);
    }
  return raw;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const int bits = draw(0, 1) ? 16 : 8;
    const float most = largest_q(bits);
    const int64_t outputs = draw(1, 40), inputs = FORMAT.block * draw(1, FORMAT.block == 32 ? 11 : 2), tokens = draw(0, 15);
    const std::vector<uint8_t> raw = random_rows(outputs, inputs);
    std::vector<uint8_t> tiles(minivllm_kind_packed_bytes(outputs, inputs));
    minivllm_kind_pack(raw.data(), outputs, inputs, tiles.data(), parallel, draw(1, 4));
    std::vector<float> w(outputs * inputs);
    minivllm_kind_rows(raw.data(), nullptr, outputs, inputs, w.data(), false, parallel, draw(1, 4));
    const int64_t id = draw(0, outputs - 1);
    std::vector<float> row(inputs);
    minivllm_kind_rows(raw.data(), &id, 1, inputs, row.data(), false, nullptr, 1);
    if (std::memcmp(row.data(), &w[id * inputs], 4 * inputs)) return std::printf("case %d: another row\n", c), 1;
    std::vector<float> bias(draw(0, 1) ? outputs : 0);
    for (float& b : bias) b = normal();
    // Two parts, one above the other, of the same rows.
    const minivllm_blocks_part part{tiles.data(), bits == 8 ? minivllm_kind_multiply_8 : minivllm_kind_multiply_16, outputs}, parts[]{part, part};
    std::vector<float> twice(bias);
    twice.insert(twice.end(), bias.begin(), bias.end());
    const minivllm_blocks matrix{parts, 2, twice.empty() ? nullptr : twice.data(), 2 * outputs, inputs, bits};
    Values x(draw(0, 1), tokens * inputs);
    x.fill_normal();
    Values y(false, tokens * 2 * outputs), narrow(true, tokens * 2 * outputs), alone(false, 2 * outputs);
    minivllm_blocks_linear(&matrix, x.bytes.data(), y.bytes.data(), tokens, x.bf16, 0, 0, parallel, draw(1, 4));
    minivllm_blocks_linear(&matrix, x.bytes.data(), narrow.bytes.data(), tokens, x.bf16, 1, 0, parallel, draw(1, 4));
    for (int64_t t = 0; t < tokens; t++) {
      const uint8_t* token = x.bytes.data() + t * inputs * (x.bf16 ? 2 : 4);
      minivllm_blocks_linear(&matrix, token, alone.bytes.data(), 1, x.bf16, 0, 0, parallel, draw(1, 4));
      if (std::memcmp(alone.bytes.data(), &y.bytes[t * 8 * outputs], 8 * outputs))
        return std::printf("case %d: token %d alone is another\n", c, int(t)), 1;
      for (int64_t n = 0; n < 2 * outputs; n++) {
        double wanted = bias.empty() ? 0 : twice[n], size = std::fabs(wanted);
        for (int64_t first = 0; first < inputs; first += UNIT) {
          float largest = 0;
          for (int64_t i = first; i < first + UNIT; i++) largest = std::max(largest, std::fabs(x.get(t * inputs + i)));
          const float inverse = most / largest;
          for (int64_t i = first; i < first + UNIT; i++) {
            const double q = std::nearbyint(x.get(t * inputs + i) * inverse) * double(largest / most);
            const double weight = w[n % outputs * inputs + i];
            wanted += q * weight;
            size += std::fabs(q * weight);
          }
        }
        // A sum in fp32: two roundings a group, and of codes and minima that cancel, larger than what they make.
        const double additions = (FORMAT.minima ? 16 : 1) * (4 + 2. * inputs / FORMAT.group);
        const double error = std::fabs(y.get(t * 2 * outputs + n) - wanted) / (additions * 0x1p-24 * size);
        worst = error <= worst ? worst : error;  // NaN is worst of all
        const double rounded = std::fabs(narrow.get(t * 2 * outputs + n) - y.get(t * 2 * outputs + n));
        if (!(rounded <= 0x1p-8 * std::fabs(y.get(t * 2 * outputs + n)))) return std::printf("case %d: bf16\n", c), 1;
      }
    }
  }
  static const char* const units[]{"plain loops", "AVX2", "VNNI in 256 bits", "sdot", "smmla"};
  std::printf("blocks on %s: %d random products, %.3f of what they may err\n", units[minivllm_blocks_unit()], cases, worst);
  return !(worst <= 1);
}
