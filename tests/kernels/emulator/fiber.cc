#include "fiber.h"

#ifdef __x86_64__
// Saves what a callee must save. A jump takes the place of `ret`, whose target the processor would foretell wrongly.
asm(R"(
.text
.hidden dsv4c_switch_stack
.globl dsv4c_switch_stack
.type dsv4c_switch_stack, @function
dsv4c_switch_stack:
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
  popq %rcx
  jmp *%rcx
.size dsv4c_switch_stack, .-dsv4c_switch_stack
)");
#endif
