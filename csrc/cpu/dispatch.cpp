#include "dispatch.h"

#include <atomic>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include "tile_permission.h"
#endif

namespace seq1f1b::cpu {
namespace {

#if defined(__x86_64__)
// The builtin also asks whether the operating system keeps the registers. It does not know F16C in older compilers.
bool runs_avx2() {
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#else
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
#endif

#if defined(__x86_64__) && defined(__linux__)
bool runs_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!runs_avx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool tiles = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
  const bool bfloat16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);  // AVX512-BF16
  return tiles && bfloat16 && tiles_are_granted();
}
#else
bool runs_amx() { return false; }
#endif

std::vector<const Kernels*> find_available() {
  std::vector<const Kernels*> found{generic_kernels};
  if (avx2_kernels && runs_avx2()) found.push_back(avx2_kernels);
  if (avx512_kernels && runs_avx512()) found.push_back(avx512_kernels);
  if (amx_kernels && runs_amx()) found.push_back(amx_kernels);
  return found;
}

const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

const Kernels* by_name(const std::string& name) {
  for (const Kernels* k : available()) {
    if (name == k->name) return k;
  }
  return nullptr;
}

// Null: the fastest for each dtype.
std::atomic<const Kernels*> chosen{nullptr};

bool computes(const Kernels& kernels, DType dtype) {
  return &kernels != amx_kernels || dtype == DType::bfloat16;
}

}  // namespace

const std::vector<std::string>& variants() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kernels* k : available()) all.emplace_back(k->name);
    return all;
  }();
  return names;
}

const Kernels& kernels(DType dtype) {
  const Kernels* choice = chosen.load(std::memory_order_relaxed);
  if (choice && computes(*choice, dtype)) return *choice;
  const std::vector<const Kernels*>& found = available();
  size_t last = found.size() - 1;
  while (!computes(*found[last], dtype)) --last;
  return *found[last];
}

bool use(const std::string& name) {
  const Kernels* choice = name.empty() ? nullptr : by_name(name);
  if (!choice && !name.empty()) return false;
  chosen.store(choice, std::memory_order_relaxed);
  return true;
}

}  // namespace seq1f1b::cpu
