// Memory that a thread works in, kept from call to call. Its size depends on the sizes of the heads only.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace seq1f1b::cpu::amx {
namespace {

constexpr int64_t kAlignment = 64;

class ThreadMemory {
 public:
  ThreadMemory() = default;
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;
  ~ThreadMemory() { std::free(memory_); }

  char* at_least(int64_t bytes) {
    if (bytes > bytes_) {
      std::free(memory_);
      bytes_ = 0;
      memory_ = static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes)));
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// Gives out pieces of a thread's memory. Without memory it only adds up how much the same pieces would need.
class Pieces {
 public:
  explicit Pieces(char* memory) : memory_(memory) {}

  template <class T = char>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// The buffers of type `Buffers`, whose constructor takes its pieces and then `arguments`.
template <class Buffers, class... Arguments>
Buffers thread_buffers(const Arguments&... arguments) {
  thread_local ThreadMemory memory;
  Pieces counted(nullptr);
  Buffers(counted, arguments...);
  Pieces pieces(memory.at_least(counted.used()));
  return Buffers(pieces, arguments...);
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
