// Small kernels that are right, or wrong in one way, to see whether the emulation notices; and its roundings. All
// kernels are to write 0, 1, 2, ... to `out`, from `in` or from their own index, by way of shared memory.
#include "../../csrc/cuda/emulation/emulation.h"

using namespace seq1f1b::cuda;

namespace {

constexpr int threads = 128;
constexpr int copies = threads / 4;  // threads that copy four floats each

float* shared() { return reinterpret_cast<float*>(shared_memory()); }

// Another thread's value, which has to be there.
template <bool Barrier>
void through_shared(float* out, const float*) {
  const unsigned thread = threadIdx.x;
  shared()[thread] = static_cast<float>(thread);
  if (Barrier) __syncthreads();
  const float other = shared()[threads - 1 - thread];
  if (Barrier) __syncthreads();
  out[threads - 1 - thread] = other;
}

template <bool Barrier>
void through_warp(float* out, const float*) {
  const unsigned thread = threadIdx.x, other = thread ^ 1;
  shared()[thread] = static_cast<float>(thread);
  if (Barrier) __syncwarp();
  out[other] = shared()[other];
}

// A tile that is overwritten while others still read it.
template <bool Barrier>
void overwritten(float* out, const float*) {
  const unsigned thread = threadIdx.x, other = threads - 1 - thread;
  shared()[thread] = static_cast<float>(thread);
  __syncthreads();
  const float value = shared()[other];
  out[other] = value;
  if (Barrier) __syncthreads();
  shared()[thread] = -1;
}

template <bool Wait, bool Barrier>
void copied(float* out, const float* in) {
  const unsigned thread = threadIdx.x;
  if (thread < copies) copy_async(shared() + 4 * thread, in + 4 * thread, 16);
  commit_copies();
  if (Wait) wait_for_copies<0>();
  if (Barrier) __syncthreads();
  out[thread] = shared()[thread];
}

// The second of two groups is read when only the first is sure to be there.
template <int Pending>
void copied_in_groups(float* out, const float* in) {
  const unsigned thread = threadIdx.x;
  if (thread < copies / 2) copy_async(shared() + 4 * thread, in + 4 * thread, 16);
  commit_copies();
  if (thread >= copies / 2 && thread < copies) copy_async(shared() + 4 * thread, in + 4 * thread, 16);
  commit_copies();
  wait_for_copies<Pending>();
  __syncthreads();
  out[thread] = shared()[thread];
}

void own_index(float* out) { out[threadIdx.x] = static_cast<float>(threadIdx.x); }

void too_many_barriers(float* out, const float*) {
  own_index(out);
  const int rounds = threadIdx.x < 32 ? 2 : 1;
  for (int i = 0; i < rounds; ++i) __syncthreads();
}

void different_barriers(float* out, const float*) {
  own_index(out);
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void barrier_without_a_lane(float* out, const float*) {
  own_index(out);
  if (threadIdx.x % 32 != 7) __syncwarp();
}

void write_outside(float* out, const float*) {
  own_index(out);
  shared()[threads + threadIdx.x] = 1;
}

void matrix_outside(float* out, const float*) {
  own_index(out);
  uint32_t to[4];
  ldmatrix(to, shared() + threads - 16 + threadIdx.x % 32 * 4);
}

void unaligned_copy(float* out, const float* in) {
  own_index(out);
  copy_async(shared(), in + 1, 16);
}

using Kernel = void (*)(float*, const float*);
constexpr struct {
  const char* name;
  Kernel kernel;
} kernels[] = {
    {"through shared memory", through_shared<true>},
    {"no barrier", through_shared<false>},
    {"through a warp", through_warp<true>},
    {"no warp barrier", through_warp<false>},
    {"overwritten after a barrier", overwritten<true>},
    {"overwritten too early", overwritten<false>},
    {"copied", copied<true, true>},
    {"copied without waiting", copied<false, true>},
    {"copied without a barrier", copied<true, false>},
    {"copied in groups", copied_in_groups<0>},
    {"copied in groups, one pending", copied_in_groups<1>},
    {"too many barriers", too_many_barriers},
    {"different barriers", different_barriers},
    {"barrier without a lane", barrier_without_a_lane},
    {"write outside", write_outside},
    {"matrix outside", matrix_outside},
    {"unaligned copy", unaligned_copy},
};

template <class T>
void round_all(const float* from, uint16_t* rounded, float* back, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T number;
    round_to(from[i], number);
    rounded[i] = number.bits;
    back[i] = to_float(number);
  }
}

}  // namespace

extern "C" {

// Runs the kernel of that name in two blocks; gives a cudaError_t, or -1 if there is no such kernel.
int seq1f1b_emulation_check(const char* name, uint64_t seed, float* out, const float* in) {
  seq1f1b::emulation::seed(seed);
  for (const auto& entry : kernels)
    if (std::strcmp(entry.name, name) == 0) return launch(entry.kernel, 2, threads, 4 * threads, nullptr, out, in);
  return -1;
}

const char* seq1f1b_emulation_error() { return seq1f1b::emulation::last_error().c_str(); }

void seq1f1b_emulation_round_bfloat16(const float* from, uint16_t* rounded, float* back, int64_t count) {
  round_all<BFloat16>(from, rounded, back, count);
}

void seq1f1b_emulation_round_float16(const float* from, uint16_t* rounded, float* back, int64_t count) {
  round_all<Float16>(from, rounded, back, count);
}

}  // extern "C"
