// Stacks that one thread of the host switches between: the threads of an emulated block.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __x86_64__
// swapcontext() makes a system call each time, which dominates a kernel's run.
extern "C" void dsv4c_switch_stack(void** save, void* load) __attribute__((visibility("hidden")));
#else
#include <ucontext.h>
#endif

namespace emulate {

#ifdef __x86_64__
struct Context {
  void* stack_pointer = nullptr;

  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15});
    *--top = nullptr;  // the return address of entry, which never returns; it also aligns the stack as a call does
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    stack_pointer = top;
  }
};

inline void switch_context(Context& from, Context& to) { dsv4c_switch_stack(&from.stack_pointer, to.stack_pointer); }
#else
struct Context {
  ucontext_t context;

  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

}  // namespace emulate
