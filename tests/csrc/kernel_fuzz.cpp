// Runs every variant of the CPU kernels on random problems and compares with the formulas in double precision.
//
//   kernel_fuzz [cases = 200] [seed = 1]
//
// Any layout, dtype and option; hidden keys hold no numbers; nothing but the outputs may change; how tasks are split
// into ranges may not change a bit. Prints the case that fails and exits with 1. AMX is emulated where it is missing.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "amx_emulation.h"
#include "cpu/dispatch.h"
#include "cpu/kernels.h"
#include "guarded_tensor.h"
#include "reference.h"
#include "rounding.h"

namespace seq1f1b::fuzz {
namespace {

using cpu::Kernels;
using cpu::Part;

const char* name_of(DType dtype) {
  const char* names[] = {"float32", "float64", "bfloat16", "float16"};
  return names[int(dtype)];
}

bool runs(const std::string& variant) {
  const std::vector<std::string>& all = cpu::variants();
  return std::find(all.begin(), all.end(), variant) != all.end();
}

bool emulates_amx() {
  static const bool emulates = cpu::amx_kernels && !runs("amx") && emulate_amx();
  return emulates;
}

// The variants that compute a dtype here.
std::vector<const Kernels*> variants_for(DType dtype) {
  std::vector<const Kernels*> found;
  for (const std::string& name : cpu::variants()) {
    cpu::use(name);
    if (cpu::kernels(dtype).name == name) found.push_back(&cpu::kernels(dtype));
  }
  if (dtype == DType::bfloat16 && emulates_amx()) found.push_back(cpu::amx_kernels);
  return found;
}

struct Case {
  Problem p{};
  std::vector<int32_t> first_key;
  std::unique_ptr<bool[]> key_mask;
  bool sinks = false;  // whether the backward gets a log-sum-exp of more than the keys
  double growth = 0;   // of a key's entries with its number: scores that rise from block to block

  std::string text() const {
    char line[400];
    std::snprintf(line, sizeof line,
                  "dtype=%s rows=%" PRId64 " heads=%" PRId64 "/%" PRId64 " queries=%" PRId64 " keys=%" PRId64
                  " size=%" PRId64 "/%" PRId64 " scale=%g softcap=%g window=%" PRId64 "%s%s%s growth=%g",
                  name_of(p.dtype), p.rows, p.heads, p.kv_heads, p.queries, p.keys, p.size, p.value_size, p.scale,
                  p.softcap, p.window, p.first_key ? " first_key" : "", p.key_mask ? " key_mask" : "",
                  sinks ? " sinks" : "", growth);
    return line;
  }
};

int64_t random_size(Random& random) {
  const int64_t usual[] = {16, 32, 64, 80, 96, 128};
  if (chance(random, 0.4)) return usual[between(random, 0, 5)];
  return chance(random, 0.1) ? between(random, 1, 288) : between(random, 1, 72);
}

Case random_case(Random& random) {
  Case c;
  Problem& p = c.p;
  p.dtype = DType(between(random, 0, 3));
  p.rows = between(random, 1, 2);
  p.kv_heads = between(random, 1, 3);
  p.heads = p.kv_heads * between(random, 1, chance(random, 0.1) ? 40 : 5);
  p.queries = chance(random, 0.2) ? 1 : between(random, 1, chance(random, 0.2) ? 700 : 90);
  p.keys = p.queries + (chance(random, 0.3) ? 0 : between(random, 0, chance(random, 0.2) ? 900 : 300));
  if (chance(random, 0.1)) p.queries = between(random, 1, 20), p.keys = between(random, 1000, 3000);
  p.size = random_size(random);
  p.value_size = chance(random, 0.7) ? p.size : random_size(random);
  constexpr int64_t most_work = 12'000'000;
  while (p.rows * p.heads * p.queries * p.keys * (p.size + p.value_size) > most_work) {
    if (p.rows > 1) {
      p.rows = 1;
    } else if (p.heads > 2 * p.kv_heads) {
      p.heads = 2 * p.kv_heads;
    } else if (p.kv_heads > 1) {
      p.heads = p.heads / p.kv_heads;
      p.kv_heads = 1;
    } else {
      p.queries = (p.queries + 1) / 2;
      p.keys = std::max(p.queries, p.keys * 3 / 4);
    }
  }
  p.scale = (chance(random, 0.2) ? 6 : 1) / std::sqrt(double(p.size));
  p.softcap = chance(random, 0.3) ? 1 + double(between(random, 0, 400)) / 10 : 0;
  p.window = chance(random, 0.3) ? between(random, 1, p.keys + 10) : 0;
  if (chance(random, 0.3)) {
    // Documents; some queries are beyond any key of theirs, and some values lie out of range.
    int32_t first = int32_t(between(random, -3, p.keys / 2));
    for (int64_t i = 0; i < p.rows * p.queries; ++i) {
      if (chance(random, 0.05)) first = int32_t(between(random, 0, p.keys + 2));
      c.first_key.push_back(first);
    }
    p.first_key = c.first_key.data();
  }
  if (chance(random, 0.3)) {
    c.key_mask = std::make_unique<bool[]>(size_t(p.rows * p.keys));
    const double density = chance(random, 0.2) ? 0 : chance(random, 0.5) ? 1 : 0.9;
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t left = chance(random, 0.5) ? between(random, 0, p.keys) : 0;
      const int64_t right = chance(random, 0.5) ? between(random, left, p.keys) : p.keys;
      for (int64_t n = 0; n < p.keys; ++n) {
        c.key_mask[size_t(r * p.keys + n)] = n >= left && n < right && chance(random, density);
      }
    }
    p.key_mask = c.key_mask.get();
  }
  c.sinks = chance(random, 0.3);
  // Moderate, or so that weights by an early block's maximum would leave the range of float.
  if (chance(random, 0.2)) c.growth = (chance(random, 0.5) ? 8.0 : 300.0) / double(p.keys);
  return c;
}

struct Tolerance {
  double of_outputs;  // relative to one, or to the largest entry; of what is stored in the inputs' dtype
  double of_sums;     // of gradients that are stored in float or double
  double of_lse;

  Tolerance times(double factor) const { return {factor * of_outputs, factor * of_sums, factor * of_lse}; }
};
Tolerance tolerance(DType dtype, bool amx) {
  switch (dtype) {
    case DType::float64:
      return {1e-12, 1e-12, 1e-12};
    case DType::float32:
      return {1e-5, 1e-5, 1e-5};
    case DType::float16:
      return {1e-3, 1e-5, 1e-5};
    default:
      return {6e-3, amx ? 4e-3 : 1e-5, 1e-5};  // AMX rounds weights and their gradients too
  }
}

void expect(bool holds, const std::string& message) {
  if (!holds) throw std::runtime_error(message);
}

void compare(const char* what, const GuardedTensor& found, Dense& truth, double tolerance,
             const GuardedTensor* before = nullptr) {
  double largest = 1;
  for (double x : truth.numbers) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  found.each([&](int64_t r, int64_t h, int64_t t, int64_t d) {
    const double wanted = truth.at(r, h, t, d) + (before ? before->get(r, h, t, d) : 0), got = found.get(r, h, t, d);
    if (wanted == got) return;  // infinities
    if (std::fabs(wanted - got) <= tolerance * largest) return;
    char line[200];
    std::snprintf(line, sizeof line, "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is %.9g, expected %.9g", what,
                  r, h, t, d, got, wanted);
    throw std::runtime_error(line);
  });
  expect(found.gaps_intact(), std::string(what) + ": something outside of it was written");
}

// Ranges of random length in random order.
std::vector<std::pair<int64_t, int64_t>> random_ranges(int64_t tasks, Random& random) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t begin = 0; begin < tasks;) {
    const int64_t end = std::min(tasks, begin + between(random, 1, 3));
    ranges.emplace_back(begin, end);
    begin = end;
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  return ranges;
}

class Fuzz {
 public:
  Fuzz(const Case& c, Random& random)
      : p(c.p),
        wide(c.p.dtype == DType::float64 ? DType::float64 : DType::float32),
        random(random),
        query(p.dtype, {p.rows, p.heads, p.queries, p.size}, random, 0),
        key(p.dtype, {p.rows, p.kv_heads, p.keys, p.size}, random, 0),
        value(p.dtype, {p.rows, p.kv_heads, p.keys, p.value_size}, random, 0),
        gradient(p.dtype, {p.rows, p.heads, p.queries, p.value_size}, random, 0),
        output(p.dtype, {p.rows, p.heads, p.queries, p.value_size}, random, 16),
        lse(contiguous_lse()),
        query_gradient(p.dtype, {p.rows, p.heads, p.queries, p.size}, random, 16),
        key_sums(wide, {p.rows, p.kv_heads, p.keys, p.size}, random, 16),
        value_sums(wide, {p.rows, p.kv_heads, p.keys, p.value_size}, random, 16) {
    query.fill(random, 1), key.fill(random, 1), value.fill(random, 1), gradient.fill(random, 1);
    key_sums.fill(random, 1), value_sums.fill(random, 1);
    key.each([&](int64_t r, int64_t h, int64_t n, int64_t d) {
      key.set(r, h, n, d, key.get(r, h, n, d) * (1 + c.growth * double(n)));
      if (p.key_mask && !p.key_mask[r * p.keys + n]) key.set(r, h, n, d, NAN);
    });
    value.each([&](int64_t r, int64_t h, int64_t n, int64_t d) {
      if (p.key_mask && !p.key_mask[r * p.keys + n]) value.set(r, h, n, d, NAN);
    });
  }

  void run(const Case& c) {
    const Inputs inputs{Dense(query), Dense(key), Dense(value)};
    ForwardTruth truth(p, inputs);
    // Digits that scores lose on their way through the exponential, and their gradients as differences of long sums.
    const double lost = 1 + truth.largest_score / 4;
    const double lost_backward = lost + p.scale * std::sqrt(double(p.value_size));
    for (const Kernels* kernels : variants_for(p.dtype)) {
      const Tolerance t = tolerance(p.dtype, kernels == cpu::amx_kernels);
      try {
        run_forward(*kernels, truth, t.times(lost));
        if (c.sinks) {
          lse.each([&](int64_t r, int64_t h, int64_t i, int64_t d) {
            lse.set(r, h, i, d, lse.get(r, h, i, d) + double(i % 5) / 4);
          });
        }
        BackwardTruth gradients(p, inputs, Dense(gradient), Dense(output), Dense(lse));
        run_backward(*kernels, gradients, t.times(lost_backward));
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(kernels->name + std::string(": ") + error.what() + "\n  " + c.text());
      }
    }
  }

 private:
  const Problem& p;
  const DType wide;
  Random& random;
  GuardedTensor query, key, value, gradient, output, lse, query_gradient, key_sums, value_sums;

  GuardedTensor contiguous_lse() {
    Random fixed;
    for (;;) {
      GuardedTensor t(wide, {p.rows, p.heads, p.queries, 1}, fixed, 16);
      if (t.input().row == p.heads * p.queries && t.input().head == p.queries && t.input().token == 1) return t;
    }
  }

  void run_forward(const Kernels& kernels, ForwardTruth& truth, const Tolerance& t) {
    Forward whole{};
    static_cast<Problem&>(whole) = p;
    whole.query = query.input(), whole.key = key.input(), whole.value = value.input();
    whole.output = output.output(), whole.lse = lse.output().data;
    GuardedTensor split_output = output, split_lse = lse;
    Forward split = whole;
    split.output = split_output.output(), split.lse = split_lse.output().data;

    const int64_t tasks = kernels.forward_tasks(whole);
    kernels.forward(whole, 0, tasks);
    for (auto [begin, end] : random_ranges(tasks, random)) kernels.forward(split, begin, end);
    compare("output", output, truth.output, t.of_outputs);
    compare("lse", lse, truth.lse, t.of_lse);
    expect(output.bytes() == split_output.bytes() && lse.bytes() == split_lse.bytes(),
           "the forward depends on how its tasks are split");
  }

  void run_backward(const Kernels& kernels, BackwardTruth& truth, const Tolerance& t) {
    const GuardedTensor key_before = key_sums, value_before = value_sums;
    Backward whole{};
    static_cast<Problem&>(whole) = p;
    whole.gradient = gradient.input(), whole.query = query.input(), whole.key = key.input();
    whole.value = value.input(), whole.output = output.input(), whole.lse = lse.input().data;
    for (bool two_parts : {false, true}) {
      std::vector<Part> parts{Part::all};
      if (two_parts) parts = {Part::query, Part::key_value};
      GuardedTensor dq = query_gradient, dk = key_before, dv = value_before;
      GuardedTensor split_dq = query_gradient, split_dk = key_before, split_dv = value_before;
      Backward split = whole;
      whole.query_gradient = dq.output(), whole.key_gradient = dk.output(), whole.value_gradient = dv.output();
      split.query_gradient = split_dq.output(), split.key_gradient = split_dk.output();
      split.value_gradient = split_dv.output();
      for (Part part : parts) {
        const int64_t tasks = kernels.backward_tasks(whole, part);
        kernels.backward(whole, part, 0, tasks);
        for (auto [begin, end] : random_ranges(tasks, random)) kernels.backward(split, part, begin, end);
      }
      compare("query gradient", dq, truth.query, t.of_outputs);
      compare("key gradient", dk, truth.key, t.of_sums, &key_before);
      compare("value gradient", dv, truth.value, t.of_sums, &value_before);
      expect(dq.bytes() == split_dq.bytes() && dk.bytes() == split_dk.bytes() && dv.bytes() == split_dv.bytes(),
             "the backward depends on how its tasks are split");
    }
  }
};

void check_rounding_of_all(Random& random) {
  for (DType dtype : {DType::bfloat16, DType::float16}) {
    for (const Kernels* kernels : variants_for(dtype)) check_rounding(*kernels, dtype, random);
  }
}

int run(int64_t cases, uint64_t seed) {
  try {
    Random random(seed);
    check_rounding_of_all(random);
  } catch (const std::runtime_error& error) {
    std::printf("seed %" PRIu64 ": %s\n", seed, error.what());
    return 1;
  }
  for (int64_t i = 0; i < cases; ++i) {
    Random random(seed * 1'000'003 + uint64_t(i));
    const Case c = random_case(random);
    try {
      Fuzz(c, random).run(c);
    } catch (const std::runtime_error& error) {
      std::printf("case %" PRId64 " of seed %" PRIu64 ": %s\n", i, seed, error.what());
      return 1;
    }
  }
  std::printf("%" PRId64 " cases:", cases);
  for (const std::string& name : cpu::variants()) std::printf(" %s,", name.c_str());
  if (emulates_amx()) std::printf(" amx (emulated),");
  std::printf(" all agree with the formulas\n");
  if (!runs("amx") && !emulates_amx()) {
    std::printf("amx was not tested: it takes AMX, or AVX512-BF16 to emulate it, and a compiler that knows both\n");
  }
  return 0;
}

}  // namespace
}  // namespace seq1f1b::fuzz

int main(int argc, char** argv) {
  return seq1f1b::fuzz::run(argc > 1 ? std::atoll(argv[1]) : 200, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
}
