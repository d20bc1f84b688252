// Scratch memory of the calling thread. It is kept from call to call, so a loop over chunks allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>

namespace seq1f1b::cpu {

// At least `bytes` bytes, aligned to a cache line, contents undefined; valid until the thread's next call of this.
char* workspace(size_t bytes);

namespace {

// Cuts a workspace into arrays. Without memory it only measures: run the same cuts twice.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    char* at = memory_ ? memory_ + used_ : nullptr;
    used_ += (size_t(count) * sizeof(T) + line - 1) / line * line;
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t line = 64;
  char* memory_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace seq1f1b::cpu
