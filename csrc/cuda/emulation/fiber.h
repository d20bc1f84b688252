// A thread of execution that runs only while it is resumed.
#pragma once
#include <cstddef>
#include <memory>

namespace seq1f1b::emulation {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  // The next resume calls `entry`, which must never return. What ran before is dropped.
  void prepare(void (*entry)());

  // Runs the fiber until it pauses.
  void resume();

  // Called on the fiber: returns to whoever resumed it.
  void pause();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace seq1f1b::emulation
