// Deltas of several adapters, of ranks and widths that are no multiple of a vector, against plain loops in double.
#include "../../kernels/cpu/lora.cpp"
#include "check.h"

using namespace minivllm;

// As kernels/cpu/lora.py packs them.
Values pack_a(const Values& a, int64_t ranks, int64_t n_in) {
  const int64_t width = LINE / (a.bf16 ? 2 : 4), lines = (n_in + width - 1) / width, blocks = (ranks + RANKS - 1) / RANKS;
  Values packed(a.bf16, blocks * RANKS * lines * width);
  for (int64_t r = 0; r < ranks; r++)
    for (int64_t i = 0; i < n_in; i++)
      packed.set(((r / RANKS * lines + i / width) * RANKS + r % RANKS) * width + i % width, a.get(r * n_in + i));
  return packed;
}

Values pack_b(const Values& b, int64_t rank, int64_t rows) {
  Values packed(b.bf16, (rows + PANEL - 1) / PANEL * rank * PANEL);
  for (int64_t r = 0; r < rank; r++)
    for (int64_t n = 0; n < rows; n++) packed.set((n / PANEL * rank + r) * PANEL + n % PANEL, b.get(r * rows + n));
  return packed;
}

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const bool bf16 = draw(0, 1);
    const int64_t n_in = draw(1, 150), n_out = draw(3, 200), num_tokens = draw(1, 30), num_slots = draw(1, 4);
    Values x(bf16, num_tokens * n_in), y(bf16, num_tokens * n_out);
    x.fill_normal();
    y.fill_normal();
    const Values before = y;
    std::vector<std::unique_ptr<Values>> memory;
    auto keep = [&](Values values) {
      memory.push_back(std::make_unique<Values>(std::move(values)));
      return (char*)memory.back()->bytes.data();
    };
    auto make = [&](int64_t count) {
      memory.push_back(std::make_unique<Values>(bf16, count));
      memory.back()->fill_normal(0.2f);
      return memory.back().get();
    };
    struct Matrices {
      Values *a, *b[3];
    };
    std::vector<Delta> slots(num_slots, Delta{});
    std::vector<Matrices> matrices(num_slots);
    for (int64_t s = 0; s < num_slots; s++) {
      if (!draw(0, 4)) continue;  // this slot leaves the layer alone
      Delta& delta = slots[s];
      delta.num_parts = draw(1, 3);
      int64_t row = 0;
      for (int64_t p = 0; p < delta.num_parts; p++) {
        const int64_t rank = draw(1, 20), left = n_out - row - (delta.num_parts - 1 - p), rows = draw(1, left);
        matrices[s].b[p] = make(rank * rows);
        delta.parts[p] = {keep(pack_b(*matrices[s].b[p], rank, rows)), delta.num_ranks, rank, row, rows};
        delta.num_ranks += rank;
        row += rows;
      }
      matrices[s].a = make(delta.num_ranks * n_in);
      delta.a = keep(pack_a(*matrices[s].a, delta.num_ranks, n_in));
      delta.num_ranks = (delta.num_ranks + RANKS - 1) / RANKS * RANKS;
    }
    std::vector<int64_t> order(num_tokens), tokens, tasks;
    for (int64_t t = 0; t < num_tokens; t++) order[t] = t;
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int64_t> slot_of(num_tokens, -1);
    for (int64_t s = 0, next = 0; s < num_slots && next < num_tokens; s++) {
      const int64_t begin = tokens.size(), count = draw(1, num_tokens - next);
      for (int64_t i = 0; i < count; i++, next++) {
        tokens.push_back(order[next]);
        slot_of[order[next]] = s;
      }
      for (int64_t i = begin; i < (int64_t)tokens.size(); i += 8)
        tasks.insert(tasks.end(), {s, i, std::min<int64_t>(i + 8, tokens.size())});
    }
    const Groups groups{(int64_t)tasks.size() / 3, tasks.data(), tokens.data()};
    minivllm_lora(slots.data(), &groups, x.bytes.data(), y.bytes.data(), n_in, n_out, bf16, parallel, draw(1, 4));
    for (int64_t t = 0; t < num_tokens; t++)
      for (int64_t n = 0; n < n_out; n++) {
        double wanted = before.get(t * n_out + n), size = std::fabs(wanted);
        if (const int64_t s = slot_of[t]; s >= 0 && slots[s].a != nullptr)
          for (int64_t p = 0; p < slots[s].num_parts; p++) {
            const Part& part = slots[s].parts[p];
            if (n < part.first_row || n >= part.first_row + part.num_rows) continue;
            for (int64_t r = 0; r < part.rank; r++) {
              double hidden = 0, hidden_size = 0;
              for (int64_t i = 0; i < n_in; i++) {
                const double term = double(matrices[s].a->get((part.first_rank + r) * n_in + i)) * x.get(t * n_in + i);
                hidden += term;
                hidden_size += std::fabs(term);
              }
              const double b = matrices[s].b[p]->get(r * part.num_rows + n - part.first_row);
              wanted += hidden * b;
              size += hidden_size * std::fabs(b);
            }
          }
        const double error = std::fabs(y.get(t * n_out + n) - wanted) / (1e-5 * size + 2 * y.unit() * std::fabs(wanted));
        worst = error <= worst ? worst : error;  // NaN is worst of all
      }
    if (!(worst <= 1)) return std::printf("lora: case %d: %g of what is allowed\n", c, worst), 1;
  }
  std::printf("lora: %d random batches, worst error %.2f of what is allowed\n", cases, worst);
}
