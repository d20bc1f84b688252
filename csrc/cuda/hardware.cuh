// The instructions that C++ has no word for, one function each. All exist from sm_80 on.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "numbers.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "The kernels need sm_80 or later: compile for compute capability 8.0 at least."
#endif

namespace seq1f1b::cuda {

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(16) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2_approximate(float x) { return __log2f(x); }

template <class V>
__device__ __forceinline__ V shuffle_xor(V value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

__device__ __forceinline__ bool any_lane(bool predicate) { return __any_sync(0xffffffffu, predicate); }

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes from global to shared memory, of which the first `bytes` are read and the others become zero.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}

// Closes the group of the thread's copies since the last one was closed.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for the thread's copies, but for those of the last `Pending` groups.
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane 8 i + j points to row j of matrix i.
__device__ __forceinline__ void ldmatrix(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum += a b for a 16x16 times 16x8 product, spread over the lanes of a warp as the PTX manual draws m16n8k16.
template <class T>
__device__ void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma<BFloat16>(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma<Float16>(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two numbers rounded to T, `low` in the lower half.
template <class T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float of_bits(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(BFloat16 x) { return of_bits(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float to_float(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

// Runs a kernel over `blocks` blocks of one dimension; no block is no error.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
           const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  constexpr int unasked_shared_bytes = 48 * 1024;
  if (shared_bytes > unasked_shared_bytes) {
    const cudaError_t refused = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (refused != cudaSuccess) return refused;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace seq1f1b::cuda
