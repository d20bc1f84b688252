// Runs the AMX kernels, as they are shipped, on processors without AMX.
//
// Such a processor refuses each tile instruction with SIGILL; a handler then does what the instruction would have done.
// That is slow, and finds what a processor with AMX would not: under AddressSanitizer, a tile outside of any memory.
// Programs are linked with -Wl,--wrap=syscall, so that the request for the tile registers is granted too.
#pragma once

namespace seq1f1b::fuzz {

// Emulates from now on, in all threads. False, and nothing changes: the processor has AMX, or it lacks AVX512-BF16,
// which the kernels use between the tile instructions.
bool emulate_amx();

}  // namespace seq1f1b::fuzz
