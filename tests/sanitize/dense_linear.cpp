// Products on the matrix unit. Its loads are not instrumented, so what they read ends where a page does that nobody may
// read.
#include "../../kernels/cpu/dense_linear.cpp"

#include <sys/mman.h>

#include "check.h"

namespace {

// `bytes` that end with readable memory.
struct Guarded {
  static constexpr size_t PAGE = 4096;
  size_t room;
  char* memory;
  char* data;

  explicit Guarded(size_t bytes)
      : room((bytes + PAGE - 1) / PAGE * PAGE),
        memory((char*)mmap(nullptr, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
        data(memory + room - bytes) {
    mprotect(memory + room, PAGE, PROT_NONE);
    std::memset(memory, 0xff, room);  // NaN, where nothing is written
  }
  ~Guarded() { munmap(memory, room + PAGE); }
  Guarded(const Guarded&) = delete;
};

}  // namespace

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  for (int c = 0; c < cases; c++) {
    const int64_t halves = draw(0, 1), inputs = 32 * draw(1, 4), outputs = draw(1, 70) * (halves ? 2 : 1);
    const int64_t tokens = draw(0, 4) == 0 ? draw(250, 600) : draw(0, 70);
    Values weight(true, outputs * inputs), x(true, tokens * inputs), y(draw(0, 1), tokens * outputs);
    weight.fill_normal();
    x.fill_normal();
    std::vector<float> bias(outputs);
    for (float& b : bias) b = normal();
    minivllm_dense matrix{nullptr, draw(0, 1) ? bias.data() : nullptr, outputs, inputs, halves};
    Guarded packed(minivllm_dense_bytes(&matrix)), rows(x.bytes.size());
    std::copy(x.bytes.begin(), x.bytes.end(), rows.data);
    minivllm_dense_pack(&matrix, weight.bytes.data(), packed.data, parallel, draw(1, 4));
    matrix.weight = packed.data;
    if (!minivllm_dense_unit()) continue;
    minivllm_dense_linear(&matrix, rows.data, y.bytes.data(), tokens, 1, y.bf16, 0, parallel, draw(1, 4));
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t n = 0; n < outputs; n++) {
        double sum = matrix.bias == nullptr ? 0 : bias[n], size = std::fabs(sum);
        for (int64_t k = 0; k < inputs; k++) {
          const double term = double(x.get(t * inputs + k)) * weight.get(n * inputs + k);
          sum += term;
          size += std::fabs(term);
        }
        const double error = std::fabs(y.get(t * outputs + n) - sum);
        if (!(error <= size * (inputs + 1) * 0x1p-24 + y.unit() * std::fabs(sum)))
          return std::printf("case %d: token %ld output %ld is off by %g\n", c, long(t), long(n), error), 1;
      }
  }
  std::printf("dense_linear: %d random products%s\n", cases, minivllm_dense_unit() ? "" : " packed; no unit for bfloat16");
}
