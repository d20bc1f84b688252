#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

// A few instructions on x86-64; ucontext, which asks the kernel at each switch, elsewhere.
#if defined(__x86_64__) && defined(__ELF__) && !defined(SEQ1F1B_EMULATION_UCONTEXT)
#define SEQ1F1B_EMULATION_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace seq1f1b::emulation {
namespace {

// Below the stack lies a page that must not be touched: an overflow stops the program at once.
class Stack {
 public:
  Stack() : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* pages = mmap(nullptr, guard_ + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, guard_, PROT_NONE) != 0) throw std::bad_alloc();
    pages_ = static_cast<char*>(pages);
  }
  Stack(const Stack&) = delete;
  ~Stack() { munmap(pages_, guard_ + size); }

  char* begin() const { return pages_ + guard_; }
  char* end() const { return begin() + size; }

  static constexpr size_t size = 64 * 1024;

 private:
  size_t guard_;
  char* pages_;
};

}  // namespace

#ifdef SEQ1F1B_EMULATION_OWN_SWITCH

// Saves what a call must preserve on the stack, and the stack's top in *from; goes on where `to` was saved.
extern "C" void seq1f1b_emulation_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
.globl seq1f1b_emulation_switch
.hidden seq1f1b_emulation_switch
.type seq1f1b_emulation_switch, @function
seq1f1b_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size seq1f1b_emulation_switch, . - seq1f1b_emulation_switch
)");

struct Fiber::Context {
  Stack stack;
  void* top = nullptr;      // of the fiber while it is paused
  void* resumer = nullptr;  // top of the stack of whoever resumed it
};

void Fiber::prepare(void (*entry)()) {
  constexpr int saved_registers = 6;
  void** top = reinterpret_cast<void**>(context_->stack.end() - 64);
  *--top = nullptr;  // where entry would return to; with it, the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < saved_registers; ++i) *--top = nullptr;
  context_->top = top;
}

void Fiber::resume() { seq1f1b_emulation_switch(&context_->resumer, context_->top); }

void Fiber::pause() { seq1f1b_emulation_switch(&context_->top, context_->resumer); }

#else

struct Fiber::Context {
  Stack stack;
  ucontext_t own, resumer;
};

void Fiber::prepare(void (*entry)()) {
  getcontext(&context_->own);
  context_->own.uc_stack.ss_sp = context_->stack.begin();
  context_->own.uc_stack.ss_size = Stack::size;
  context_->own.uc_link = nullptr;
  makecontext(&context_->own, entry, 0);
}

void Fiber::resume() { swapcontext(&context_->resumer, &context_->own); }

void Fiber::pause() { swapcontext(&context_->own, &context_->resumer); }

#endif

Fiber::Fiber() : context_(new Context) {}
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;

}  // namespace seq1f1b::emulation
