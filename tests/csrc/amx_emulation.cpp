#include "amx_emulation.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace seq1f1b::fuzz {
namespace {

constexpr int kTiles = 8, kLines = 16, kLine = 64;

struct Tile {
  alignas(kLine) unsigned char lines[kLines][kLine];
};

struct Unit {
  bool configured;
  Tile tiles[kTiles];
};
thread_local Unit unit;
bool emulating = false;
bool permitted = false;

// What the bytes of a tile instruction say. All are of the form VEX.128.0F38.W0, with one of three opcodes.
struct Instruction {
  const unsigned char* next;
  int prefix;  // 0: none, 1: 66, 2: F3, 3: F2
  int opcode, field, last, middle;  // ModRM.reg, ModRM.rm and VEX.vvvv: mostly numbers of tiles
  bool in_memory;
  uintptr_t base;
  intptr_t stride;  // of the lines of a tile

  bool is(int wanted_prefix, int wanted_opcode, bool memory) const {
    return prefix == wanted_prefix && opcode == wanted_opcode && in_memory == memory;
  }
  unsigned char* line(int number) const { return reinterpret_cast<unsigned char*>(base + uintptr_t(number * stride)); }
};

int32_t take_displacement(const unsigned char*& at) {
  int32_t value;
  std::memcpy(&value, at, sizeof value);
  at += sizeof value;
  return value;
}

// False: it is none. The general registers are as the instruction finds them.
bool decode(const unsigned char* at, const greg_t* registers, Instruction& found) {
  constexpr int general[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  if (at[0] != 0xc4 || (at[1] & 0x9f) != 0x82 || (at[2] & 0x84) != 0) return false;
  if (at[3] != 0x49 && at[3] != 0x4b && at[3] != 0x5c) return false;
  const int high_index = at[1] & 0x40 ? 0 : 8, high_base = at[1] & 0x20 ? 0 : 8;
  const int mode = at[4] >> 6;
  found = {};
  found.prefix = at[2] & 3, found.middle = ~at[2] >> 3 & 15;
  found.opcode = at[3], found.field = at[4] >> 3 & 7, found.last = at[4] & 7;
  found.in_memory = mode != 3;
  at += 5;
  if (found.in_memory) {
    const bool relative = found.last == 5 && mode == 0;
    int base = found.last;
    if (found.last == 4) {
      const int index = (*at >> 3 & 7) + high_index;
      if (index != 4) found.stride = intptr_t(registers[general[index]]) * (1 << (*at >> 6));
      base = *at++ & 7;
    }
    const bool absolute = base == 5 && mode == 0;
    if (!absolute) found.base = uintptr_t(registers[general[base + high_base]]);
    if (absolute || mode == 2) found.base += uintptr_t(take_displacement(at));
    if (mode == 1) found.base += uintptr_t(int8_t(*at++));
    if (relative) found.base += uintptr_t(at);
  }
  found.next = at;
  return true;
}

// The kernels use whole tiles only, so the emulation knows no others.
const char* configure(const unsigned char* wanted) {
  unsigned char expected[kLine] = {1};  // the palette
  for (int i = 0; i < kTiles; ++i) expected[16 + 2 * i] = kLine, expected[48 + i] = kLines;
  if (!permitted) return "the tiles are configured before the process has asked for them";
  if (std::memcmp(wanted, expected, sizeof expected) != 0) return "the configuration is not that of eight whole tiles";
  unit = {};
  unit.configured = true;
  return nullptr;
}

// Products of even and of odd terms are summed apart before they are added to what was there, as Intel's Software
// Developer's Manual says of TDPBF16PS. The order of terms decides how sums are rounded.
__attribute__((target("avx512f"), noinline)) void add_product(const Tile& left, const Tile& right, Tile& sums) {
  _mm_setcsr(0x9fc0);  // subnormal numbers are zero, no traps; returning from the handler restores what was set
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  for (int i = 0; i < kLines; ++i) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < kLines; ++k) {
      int32_t pair;
      std::memcpy(&pair, left.lines[i] + k * sizeof pair, sizeof pair);
      const __m512i a = _mm512_set1_epi32(pair), b = _mm512_load_si512(right.lines[k]);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                            _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
    }
    _mm512_store_ps(sums.lines[i], _mm512_add_ps(_mm512_load_ps(sums.lines[i]), _mm512_add_ps(even, odd)));
  }
}

// Returns what is wrong.
const char* execute(const Instruction& instruction) {
  if (instruction.is(0, 0x49, true)) return configure(instruction.line(0) + instruction.stride);  // ldtilecfg
  if (!unit.configured) return "the tiles are not configured";
  Tile& tile = unit.tiles[instruction.field];
  if (instruction.is(0, 0x49, false)) {  // tilerelease
    unit.configured = false;
  } else if (instruction.is(3, 0x49, false)) {  // tilezero
    tile = {};
  } else if (instruction.is(3, 0x4b, true) || instruction.is(1, 0x4b, true)) {  // tileloadd, tileloaddt1
    for (int i = 0; i < kLines; ++i) std::memcpy(tile.lines[i], instruction.line(i), kLine);
  } else if (instruction.is(2, 0x4b, true)) {  // tilestored
    for (int i = 0; i < kLines; ++i) std::memcpy(instruction.line(i), tile.lines[i], kLine);
  } else if (instruction.is(2, 0x5c, false)) {  // tdpbf16ps
    const int sums = instruction.field, left = instruction.last, right = instruction.middle;
    if (right >= kTiles || sums == left || sums == right || left == right) return "a product of tiles not all distinct";
    add_product(unit.tiles[left], unit.tiles[right], tile);
  } else {
    return "the kernels do not use it";
  }
  return nullptr;
}

void say(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const unsigned char* at = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
  const char* problem = "it has nothing to do with tiles";
  Instruction instruction;
  // Signals are slow, so tile instructions that follow at once are done by the way.
  while (decode(at, registers, instruction)) {
    problem = execute(instruction);
    if (problem) break;
    at = instruction.next;
  }
  registers[REG_RIP] = greg_t(at);
  if (!problem) return;
  say("illegal instruction: "), say(problem), say("\n");
  signal(SIGILL, SIG_DFL);  // it is met again, and ends the process where a debugger can see it
}

}  // namespace

bool emulate_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx >> 24 & 1)) return false;  // AMX-TILE
  if (!__builtin_cpu_supports("avx512f") || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
  if (!(eax >> 5 & 1)) return false;  // AVX512-BF16
  struct sigaction action {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  emulating = sigaction(SIGILL, &action, nullptr) == 0;
  return emulating;
}

}  // namespace seq1f1b::fuzz

// The names are those of the linker's option --wrap=syscall.
extern "C" long __real_syscall(long number, ...);
extern "C" long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
  constexpr int request_permission = 0x1023;
  if (!seq1f1b::fuzz::emulating || number != SYS_arch_prctl || int(a) != request_permission) {
    return __real_syscall(number, a, b, c, d, e, f);
  }
  seq1f1b::fuzz::permitted = true;
  return 0;
}

#else

namespace seq1f1b::fuzz {
bool emulate_amx() { return false; }
}  // namespace seq1f1b::fuzz

#endif
