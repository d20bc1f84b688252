// Linux hands out the tile registers of AMX on request, once per process and for all its threads. It must come before
// any of them uses the registers.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

namespace seq1f1b::cpu {

static inline bool tiles_are_granted() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}

}  // namespace seq1f1b::cpu
