// What the kernels are written against: the instructions of a GPU, or their imitation on the CPU. Both offer, besides
// the language (__global__, threadIdx, __syncthreads, __syncwarp, __syncthreads_or), the same functions:
//   shared_memory, exp2_approximate, log2_approximate, shuffle_xor, any_lane, copy_async, commit_copies,
//   wait_for_copies, ldmatrix, ldmatrix_transposed, mma, pack, to_float, of_bits, bits_of, launch
#pragma once
#ifdef __CUDACC__
#include "hardware.cuh"
#else
#include "emulation/emulation.h"
#endif
