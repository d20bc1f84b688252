#include "workspace.h"

#include <cstdlib>
#include <new>

namespace seq1f1b::cpu {
namespace {

struct Block {
  char* memory = nullptr;
  size_t bytes = 0;
  ~Block() { std::free(memory); }
};

}  // namespace

char* workspace(size_t bytes) {
  thread_local Block block;
  if (block.bytes < bytes) {
    std::free(block.memory);
    block.bytes = 0;
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, bytes) != 0) memory = nullptr;
    block.memory = static_cast<char*>(memory);
    if (!memory) throw std::bad_alloc();
    block.bytes = bytes;
  }
  return block.memory;
}

}  // namespace seq1f1b::cpu
