// What the bindings need of the CUDA runtime, on a machine without it.
#pragma once

enum cudaError_t { cudaSuccess };

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
