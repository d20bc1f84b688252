// The CUDA kernels as the bindings call them: on the given stream, without synchronisation. Each returns a cudaError_t.
#pragma once
#include <cstdint>

#include "../attention.h"

namespace seq1f1b::cuda {

constexpr int64_t largest_head = 256;  // entries

}  // namespace seq1f1b::cuda

extern "C" {

// bfloat16 and float16, heads of up to `largest_head` entries.
int seq1f1b_cuda_forward(const seq1f1b::Forward* problem, void* stream);

// `delta`: float scratch, [rows, heads, queries].
int seq1f1b_cuda_backward(const seq1f1b::Backward* problem, float* delta, void* stream);

// chunk -> buffer[..., start:start + tokens, :]; both [rows, heads, tokens, size], with elements of 1, 2, 4 or 8 bytes.
int seq1f1b_cuda_append(
    seq1f1b::Output buffer, seq1f1b::Input chunk, int64_t rows, int64_t heads, int64_t tokens, int64_t size,
    int64_t element_bytes, int64_t start, void* stream);

// total += part; total float, part of `dtype`; both [rows, heads, tokens, size].
int seq1f1b_cuda_accumulate(
    seq1f1b::Output total, seq1f1b::Input part, seq1f1b::DType dtype, int64_t rows, int64_t heads, int64_t tokens,
    int64_t size, void* stream);

}  // extern "C"
