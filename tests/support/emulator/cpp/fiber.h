// One fiber per GPU thread. About 25 ns a switch by hand on x86-64, ucontext elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && !defined(EMU_UCONTEXT)
#define EMU_FAST_SWITCH 1
extern "C" void emu_switch(void** save, void* load);
#else
#define EMU_FAST_SWITCH 0
#include <ucontext.h>
#endif

namespace emu {

struct Fiber {
#if EMU_FAST_SWITCH
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
};

inline void switch_fiber(Fiber& from, Fiber& to) {
#if EMU_FAST_SWITCH
  emu_switch(&from.sp, to.sp);
#else
  swapcontext(&from.context, &to.context);
#endif
}

// `entry` never returns: it switches away for good.
inline void make_fiber(Fiber& fiber, char* stack, size_t size, void (*entry)()) {
#if EMU_FAST_SWITCH
  void** top = reinterpret_cast<void**>((uintptr_t(stack) + size) & ~uintptr_t(15));
  *--top = nullptr;  // keeps the stack 16-aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // rbp rbx r12..r15
  fiber.sp = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = size;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

}  // namespace emu
