// Faults that the processor detects: traps that clang inserts for pointers that leave a local array, threads that use
// up their stack, and addresses without memory in kernels that run without checks.
#include <pthread.h>
#include <signal.h>
#if defined(__APPLE__)
#include <sys/ucontext.h>
#else
#include <ucontext.h>
#endif

#include "runtime.h"

namespace msl {

namespace {

constexpr int kSignals[] = {SIGILL, SIGTRAP, SIGSEGV, SIGBUS, SIGFPE};
constexpr int kNumSignals = sizeof kSignals / sizeof *kSignals;
struct sigaction previous[kNumSignals];
stack_t previous_stack;
alignas(16) char handler_stack[64 << 10];  // a thread that has used up its stack has none left for the handler
pthread_t launching_thread;

const void* stopped_at(const void* context) {
  const mcontext_t& machine = ((const ucontext_t*)context)->uc_mcontext;
#if defined(__APPLE__) && defined(__aarch64__)
  return (const void*)machine->__ss.__pc;
#elif defined(__x86_64__)
  return (const void*)machine.gregs[REG_RIP];
#else
  return (const void*)machine.pc;
#endif
}

const char* kind_of(const siginfo_t& info) {
  const uint64_t address = (uint64_t)info.si_addr;
  switch (info.si_signo) {
    case SIGILL:
    case SIGTRAP: return "local memory out of bounds";
    case SIGFPE: return "arithmetic stopped";
    default: return address - current->stack < kStackGuardBytes ? "private memory" : "no memory";
  }
}

// Ends the thread like any other fault, so the handler never returns. SA_NODEFER keeps the signal usable.
void handle(int signal, siginfo_t* info, void* context) {
  if (!current || !pthread_equal(pthread_self(), launching_thread)) {  // not caused by the kernel
    for (int i = 0; i < kNumSignals; i++)
      if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;
  }
  raise_fault({.kind = kind_of(*info), .code_address = (uint64_t)stopped_at(context) + 1});
}

}  // namespace

void catch_signals() {
  launching_thread = pthread_self();
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  const stack_t stack = {handler_stack, 0, sizeof handler_stack};
  sigaltstack(&stack, &previous_stack);
  for (int i = 0; i < kNumSignals; i++) sigaction(kSignals[i], &action, &previous[i]);
}

void release_signals() {
  for (int i = 0; i < kNumSignals; i++) sigaction(kSignals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

}  // namespace msl
