// The kernels that are compiled, spread over files so that several compile at once.
#pragma once
#include "../attention.h"
#include "numbers.h"

namespace seq1f1b::cuda {

template <class T, int Size>
int launch_forward(const Forward& problem, void* stream);

template <class T>
int launch_delta(const Backward& problem, float* delta, void* stream);

template <class T, int Size>
int launch_backward(const Backward& problem, float* delta, void* stream);

}  // namespace seq1f1b::cuda
