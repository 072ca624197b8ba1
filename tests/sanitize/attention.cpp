// Paged attention: random batches against plain loops in double.
//
// Every page is a block of exactly its own bytes of a heap allocation that ends with the pool, filled with NaN.
#include "../../kernels/cpu/attention.cpp"
#include "check.h"

namespace {

void encode(Kind kind, float x, char* to) {
  if (kind == F32) {
    store(to, x);
  } else if (kind == F16) {
    store(to, to_float16(x));
  } else {
    store(to, to_bf16(splat(x))[0]);
  }
}

struct Case {
  Kind kind, kv;
  int heads, kv_heads, size, block_size, window;
  float soft_cap;
  std::vector<std::pair<int, int>> requests;  // computed earlier, new

  int width(int r) const { return (requests[r].first + requests[r].second + block_size - 1) / block_size; }
};

// Worst distance from the answer, as a multiple of what the input's dtype allows.
double run(const Case& c) {
  const int num_requests = c.requests.size();
  int table_width = 1, num_blocks = 1, num_tokens = 0;
  for (int r = 0; r < num_requests; r++) {
    table_width = std::max(table_width, c.width(r));
    num_blocks += c.width(r);
    num_tokens += c.requests[r].second;
  }
  std::vector<int> ids(num_blocks - 1), tables(num_requests * table_width), starts{0}, lens;
  for (int i = 0; i < num_blocks - 1; i++) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  for (int r = 0, next = 0; r < num_requests; r++)
    for (int i = 0; i < c.width(r); i++) tables[r * table_width + i] = ids[next++];

  void* layout = minivllm_layout(c.kv_heads, c.size, c.block_size, c.kv);
  const size_t kv_bytes = size_t(num_blocks) * c.kv_heads * minivllm_page_bytes(layout);
  std::unique_ptr<char[]> kv(new char[kv_bytes]);
  std::memset(kv.get(), 0xff, kv_bytes);  // NaN in every dtype, and as a scale

  const int item = item_size(c.kind), row = (c.heads + 2 * c.kv_heads) * c.size;  // q, k and v of a token side by side
  std::normal_distribution<float> normal;
  std::vector<std::vector<char>> tokens(num_requests);  // all of a request's, [position][row]
  for (int r = 0; r < num_requests; r++) {
    const int count = (c.requests[r].first + c.requests[r].second) * row;
    tokens[r].resize(size_t(count) * item);
    for (int i = 0; i < count; i++) encode(c.kind, normal(rng), &tokens[r][size_t(i) * item]);
  }
  const float scale = 1 / std::sqrt(float(c.size));
  const minivllm_view view{c.heads, c.window, scale, c.soft_cap};
  std::vector<char> out;
  auto step = [&](bool earlier) {
    std::vector<char> inputs;
    std::vector<int64_t> slots;
    starts = {0};
    lens.clear();
    for (int r = 0; r < num_requests; r++) {
      const int begin = earlier ? 0 : c.requests[r].first, end = begin + c.requests[r].*(earlier ? &std::pair<int, int>::first : &std::pair<int, int>::second);
      inputs.insert(inputs.end(), &tokens[r][0] + size_t(begin) * row * item, &tokens[r][0] + size_t(end) * row * item);
      for (int p = begin; p < end; p++)
        slots.push_back(int64_t(tables[r * table_width + p / c.block_size]) * c.block_size + p % c.block_size);
      starts.push_back(slots.size());
      lens.push_back(end);
    }
    const int padding = 2, count = slots.size();
    inputs.resize(size_t(count + padding) * row * item);
    out.assign(size_t(count + padding) * c.heads * c.size * item, char(0xff));
    const minivllm_batch batch{starts.data(), lens.data(), tables.data(), slots.data(), num_requests, table_width, count, count + padding};
    void* plan = minivllm_plan(layout, &view, 1, &batch);
    const char* q = inputs.data();
    const minivllm_tensors tensors{q, q + c.heads * c.size * item, q + (c.heads + c.kv_heads) * c.size * item, kv.get(), out.data(), row, row, row, c.kind};
    for (int layer = 0; layer < 2; layer++) minivllm_attend(plan, 0, &tensors, parallel, draw(1, 4));
    minivllm_plan_free(plan);
  };
  step(true);
  step(false);
  minivllm_layout_free(layout);

  const double unit = c.kind == F32 ? 0x1p-24 : c.kind == F16 ? 0x1p-11 : 0x1p-8;
  double worst = 0;
  std::vector<int8_t> eight(c.size);
  auto kept = [&](float x) {
    if (c.kv != F16) return x;
    const uint16_t half = to_float16(x);
    return to_float(F16, (const char*)&half);
  };
  auto value = [&](int r, int p, int at, int d) { return to_float(c.kind, &tokens[r][(size_t(p) * row + at + d) * item]); };
  for (int r = 0; r < num_requests; r++) {
    const int length = c.requests[r].first + c.requests[r].second;
    std::vector<double> keys(size_t(length) * c.size), values(keys), scores(length);
    for (int h = 0; h < c.kv_heads; h++) {
      for (int p = 0; p < length; p++)
        for (auto [at, to] : {std::pair{c.heads + h, &keys}, {c.heads + c.kv_heads + h, &values}}) {
          float s = 1;
          const auto encode = c.kv == I8 ? quantise<I8> : quantise<E4M3>;
          if (is_quantised(c.kv)) s = encode(&tokens[r][(size_t(p) * row + at * c.size) * item], c.kind, c.size, eight.data());
          auto decoded = [&](int d) { return c.kv == I8 ? double(eight[d]) : from_e4m3(splat_word(uint8_t(eight[d])))[0]; };
          for (int d = 0; d < c.size; d++)
            (*to)[p * c.size + d] = is_quantised(c.kv) ? decoded(d) * s : kept(value(r, p, at * c.size, d));
        }
      for (int i = 0; i < c.requests[r].second; i++)
        for (int g = 0; g < c.heads / c.kv_heads; g++) {
          const int p = c.requests[r].first + i, head = h * (c.heads / c.kv_heads) + g;
          const int first = c.window ? std::max(0, p - c.window + 1) : 0;
          double peak = -1e300, sum = 0;
          for (int j = first; j <= p; j++) {
            double x = 0;
            for (int d = 0; d < c.size; d++) x += value(r, p, head * c.size, d) * keys[j * c.size + d];
            x *= scale;
            scores[j] = c.soft_cap ? c.soft_cap * std::tanh(x / c.soft_cap) : x;
            peak = std::max(peak, scores[j]);
          }
          for (int j = first; j <= p; j++) sum += scores[j] = std::exp(scores[j] - peak);
          for (int d = 0; d < c.size; d++) {
            double mean = 0;
            for (int j = first; j <= p; j++) mean += scores[j] / sum * values[j * c.size + d];
            const double got = to_float(c.kind, &out[((size_t(starts[r] + i) * c.heads + head) * c.size + d) * item]);
            const double allowed = (c.kind == F32 ? 2e-5 : 12 * unit) + 2 * unit * std::fabs(mean);
            const double error = std::fabs(got - mean) / allowed;
            worst = error <= worst ? worst : error;  // NaN is worst of all
          }
        }
    }
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 200;
  const Kind FEWER_BITS[] = {F16, I8, E4M3};
  const int block_sizes[] = {1, 2, 3, 7, 16, 20, 32, 48, 64, 256}, sizes[] = {1, 3, 8, 16, 33, 64, 80, 128};
  double worst = 0;
  auto check = [&](const Case& c) {
    const double error = run(c);
    if (!(error <= 1)) {
      std::printf("kind %d, kv %d, heads %d/%d of %d, block %d, window %d, cap %g: %g of what is allowed; requests", c.kind,
                  c.kv, c.heads, c.kv_heads, c.size, c.block_size, c.window, c.soft_cap, error);
      for (auto [computed, added] : c.requests) std::printf(" %d+%d", computed, added);
      std::printf("\n");
      std::exit(1);
    }
    worst = std::max(worst, error);
  };
  for (int i = 0; i < num_cases; i++) {
    const Kind kind = Kind(draw(0, 2));
    const int kv_heads = draw(1, 3);
    Case c{kind, draw(0, 2) ? kind : FEWER_BITS[draw(0, 2)], kv_heads * draw(1, 5), kv_heads, sizes[draw(0, 7)], block_sizes[draw(0, 9)],
           draw(0, 1) ? 0 : draw(1, 90), draw(0, 3) ? 0.0f : 4.0f, {}};
    for (int n = draw(0, 6); n > 0; n--) c.requests.emplace_back(draw(0, 3) ? draw(0, 70) : 0, draw(0, 1) ? 1 : draw(0, 40));
    check(c);
  }
  for (Kind kv : {F32, F16, BF16, I8, E4M3})
    for (int length : {1, 15, 16, 17, 512, 513, 1200}) {
      const Kind kind = is_quantised(kv) ? BF16 : kv;
      check({kind, kv, 6, 2, 64, 16, 0, 0, {{length - 1, 1}, {length, 0}, {length, 5}, {0, std::min(length, 80)}}});
    }
  check({BF16, BF16, 2, 1, 16, 16, 0, 0, {{8190, 2}, {8191, 1}}});
  std::printf("%s: %d random batches and the fixed ones, worst error %.2f of what is allowed\n", minivllm_isa(), num_cases,
              worst);
}
