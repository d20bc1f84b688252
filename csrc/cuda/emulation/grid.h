// Runs a kernel on the CPU, block after block, each thread of a block as a fiber. Which block, warp and lane goes on is
// drawn at random from a seed. What goes wrong ends the launch with an error and a message, not the process.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace seq1f1b::emulation {

struct Index {
  unsigned x;
};
extern Index thread_index, block_index;  // of the thread that runs

// Where in the source a thread waits for others.
struct Place {
  const char* file;
  int line;
};

constexpr int warp_size = 32;
constexpr int poison = 0xff;                     // bytes of what was never written: NaN in every float format
constexpr int largest_shared_bytes = 99 * 1024;  // of a block, on sm_86 and sm_89

void seed(uint64_t value);

// What went wrong in the last launch that failed.
const std::string& last_error();

// Gives a cudaError_t.
int run_grid(int64_t blocks, int threads, int shared_bytes, const std::function<void()>& kernel);

// The rest is called by the threads of a running kernel.

// Ends the launch.
[[noreturn]] void fail(const std::string& message);

char* shared_memory();

// Fails unless [address, address + bytes) lies in shared memory and is aligned to 16 bytes.
void check_shared(const void* address, int64_t bytes, const char* instruction);

// Waits for the other lanes of the warp. The last to come calls `act` with what the lanes brought, lane by lane.
void meet_warp(void* brought, void (*act)(void* const* brought), Place place);

// Waits for all threads of the block; true if the predicate of one of them was.
bool meet_block(bool predicate, Place place);

// Asynchronous copies of the running thread: poison until it waits for them, and only then read from the source.
void start_copy(void* shared, const void* global, int bytes);
void close_copies();
void await_copies(int pending_groups);

}  // namespace seq1f1b::emulation
