// Threads as fibers, threadgroup_barrier, and the loop over the threadgroups of a launch.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace msl {

Launch* launch;
Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxSimdgroups];
Fiber* current;
uint32_t num_threads, num_simdgroups, num_returned;
uint32_t epoch[kNumSpaces];
uint32_t threadgroup_index;

namespace {

void* launcher_stack_pointer;
uint32_t threadgroup_position[3];

struct {
  uint32_t waiting;
  const void* site;
  int flags;
  uint64_t passed;
} barrier;

void switch_to(Fiber* fiber) {
  if (fiber == current) return;
  if (++launch->fiber_switches % kAccessesBetweenClocks == 0 && launch->checks) check_time(nullptr);
  Fiber* from = current;
  current = fiber;
  msl_switch_fiber(&from->stack_pointer, fiber->stack_pointer);
}

uint32_t first_lane(uint32_t mask) { return launch->order ? 31 - __builtin_clz(mask) : __builtin_ctz(mask); }

// The next thread in schedule order: later lanes of this simdgroup, then the other simdgroups, then this one again.
Fiber* next_runnable() {
  const uint32_t lane = current->lane, own = current->simdgroup;
  const uint32_t later = launch->order ? (1u << lane) - 1 : (lane < 31 ? ~0u << (lane + 1) : 0);
  if (const uint32_t mask = simdgroups[own].runnable & later) return &fibers[own * kSimdWidth + first_lane(mask)];
  for (uint32_t step = 1; step <= num_simdgroups; step++) {
    const uint32_t group = (launch->order ? own + num_simdgroups - step : own + step) % num_simdgroups;
    if (const uint32_t mask = simdgroups[group].runnable) return &fibers[group * kSimdWidth + first_lane(mask)];
  }
  return nullptr;
}

// Describes the waiting threads, for a report that no thread can continue.
void describe_waiting(char* text, size_t size) {
  size_t length = snprintf(text, size, "%u of %u threads wait at threadgroup_barrier, %u returned", barrier.waiting,
                           num_threads, num_returned);
  for (uint32_t g = 0; g < num_simdgroups && length + 100 < size; g++)
    if (const Simdgroup& s = simdgroups[g]; s.waiting)
      length += snprintf(text + length, size - length, "; in simdgroup %u, %u of %u lanes wait in %s", g,
                         __builtin_popcount(s.waiting), __builtin_popcount(s.alive), s.operation);
}

MSL_COLD void raise_divergence(const void* site) {
  Fault fault = {.kind = "divergence", .code_address = (uint64_t)site};
  describe_waiting(fault.detail, sizeof fault.detail);
  raise_fault(fault);
}

void run_thread() {
  Fiber* fiber = current;
  launch->entry(launch->arguments, &fiber->attributes);
  if (recording) record_return();
  num_returned++;
  simdgroups[fiber->simdgroup].runnable &= ~(1u << fiber->lane);
  if (barrier.waiting) {
    Fault fault = {.kind = "return past barrier", .code_address = (uint64_t)barrier.site};
    describe_waiting(fault.detail, sizeof fault.detail);
    raise_fault(fault);
  }
  lane_returned();
  if (num_returned == num_threads) {
    void* abandoned;
    msl_switch_fiber(&abandoned, launcher_stack_pointer);
  }
  wait_for_others(nullptr);
  __builtin_trap();
}

void prepare_fiber(uint32_t thread, const uint32_t size[3]) {
  Fiber& fiber = fibers[thread];
  fiber.stack = launch->stacks + thread * kStackBytes;
  fiber.thread = thread;
  fiber.simdgroup = thread / kSimdWidth;
  fiber.lane = thread % kSimdWidth;
  fiber.uniform_trail = 0;
  uint64_t* top = (uint64_t*)(fiber.stack + kStackBytes);
#if defined(__x86_64__)
  *--top = 0;  // return address of run_thread; also aligns the stack for the calling convention
  *--top = (uint64_t)run_thread;
  for (int saved = 0; saved < 6; saved++) *--top = 0;
#else
  top -= 20;
  memset(top, 0, 160);
  top[11] = (uint64_t)run_thread;  // x30, the link register
#endif
  fiber.stack_pointer = top;

  msl_thread_attributes& a = fiber.attributes;
  const uint32_t local[3] = {thread % size[0], thread / size[0] % size[1], thread / size[0] / size[1]};
  for (int axis = 0; axis < 3; axis++) {
    a.thread_position_in_threadgroup[axis] = local[axis];
    a.threadgroup_position_in_grid[axis] = threadgroup_position[axis];
    a.thread_position_in_grid[axis] = threadgroup_position[axis] * launch->threadgroup[axis] + local[axis];
    a.threads_per_threadgroup[axis] = size[axis];
    a.dispatch_threads_per_threadgroup[axis] = launch->threadgroup[axis];
    a.threadgroups_per_grid[axis] = (launch->grid[axis] + launch->threadgroup[axis] - 1) / launch->threadgroup[axis];
    a.threads_per_grid[axis] = a.grid_size[axis] = launch->grid[axis];
    a.grid_origin[axis] = 0;
  }
  const uint32_t dispatched = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  a.thread_index_in_threadgroup = thread;
  a.thread_index_in_simdgroup = fiber.lane;
  a.thread_index_in_quadgroup = thread % 4;
  a.simdgroup_index_in_threadgroup = fiber.simdgroup;
  a.quadgroup_index_in_threadgroup = thread / 4;
  a.simdgroups_per_threadgroup = num_simdgroups;
  a.quadgroups_per_threadgroup = (num_threads + 3) / 4;
  a.dispatch_simdgroups_per_threadgroup = (dispatched + 31) / 32;
  a.dispatch_quadgroups_per_threadgroup = (dispatched + 3) / 4;
  a.threads_per_simdgroup = a.thread_execution_width = kSimdWidth;
}

void run_threadgroup() {
  uint32_t size[3];  // smaller than requested at the far edges of the grid
  for (int axis = 0; axis < 3; axis++) {
    const uint32_t left = launch->grid[axis] - threadgroup_position[axis] * launch->threadgroup[axis];
    size[axis] = left < launch->threadgroup[axis] ? left : launch->threadgroup[axis];
  }
  num_threads = size[0] * size[1] * size[2];
  num_simdgroups = (num_threads + kSimdWidth - 1) / kSimdWidth;
  num_returned = 0;
  barrier = {};
  for (uint32_t& e : epoch) e++;
  for (uint32_t g = 0; g < num_simdgroups; g++) {
    const uint32_t lanes = num_threads - g * kSimdWidth;
    Simdgroup& s = simdgroups[g];
    s.lanes = s.alive = s.runnable = lanes >= kSimdWidth ? ~0u : (1u << lanes) - 1;
    s.waiting = 0;
  }
  for (uint32_t thread = 0; thread < num_threads; thread++) prepare_fiber(thread, size);
  begin_threadgroup_checks();
  current = &fibers[launch->order ? num_threads - 1 : 0];
  msl_switch_fiber(&launcher_stack_pointer, current->stack_pointer);
  current = nullptr;
  end_recorded_threadgroup();
}

}  // namespace

void wait_for_others(const void* site) {
  Fiber* next = next_runnable();
  if (!next) raise_divergence(site);
  switch_to(next);
}

void raise_fault(const Fault& fault) {
  if (!launch->fault.kind) {
    if (recording) record_fault(fault);
    launch->fault = fault;
    Fault& f = launch->fault;
    if (current) {
      const msl_thread_attributes& a = current->attributes;
      f.has_thread = 1;
      memcpy(f.thread_position_in_grid, a.thread_position_in_grid, sizeof f.thread_position_in_grid);
      memcpy(f.threadgroup_position_in_grid, threadgroup_position, sizeof threadgroup_position);
      f.thread_index_in_threadgroup = current->thread;
      f.simdgroup_index_in_threadgroup = current->simdgroup;
      f.thread_index_in_simdgroup = current->lane;
    }
  }
  void* abandoned;  // kernels own nothing that must be released
  if (current) msl_switch_fiber(&abandoned, launcher_stack_pointer);
}

}  // namespace msl

using namespace msl;

MSL_CALLED void msl_threadgroup_barrier(int flags) {
  const void* site = MSL_CALLER;
  if (launch->checks && num_returned) {
    Fault fault = {.kind = "barrier after return", .code_address = (uint64_t)site};
    snprintf(fault.detail, sizeof fault.detail, "%u of %u threads of the threadgroup", num_returned, num_threads);
    raise_fault(fault);
  }
  if (!barrier.waiting) {
    barrier.site = site;
    barrier.flags = flags;
  } else if (launch->checks && barrier.site != site) {
    raise_fault({.kind = "different barriers", .code_address = (uint64_t)site,
                 .other_code_address = (uint64_t)barrier.site});
  }
  if (recording) record_barrier(kBarrierWait, flags, site);
  barrier.flags &= flags;  // memory is ordered only if every thread requests it
  if (++barrier.waiting < num_threads) {
    const uint64_t passed = barrier.passed;
    simdgroups[current->simdgroup].runnable &= ~(1u << current->lane);
    while (barrier.passed == passed) wait_for_others(site);
    return;
  }
  for (uint32_t g = 0; g < num_simdgroups; g++) {
    if (launch->checks && !trails_agree(simdgroups[g]))
      raise_fault({.kind = "partial simdgroup", .object = "simdgroup_load or simdgroup_store",
                   .code_address = (uint64_t)site});
    simdgroups[g].runnable = simdgroups[g].alive;
  }
  if (recording) record_barrier(kBarrierPassed, barrier.flags, site);
  barrier.waiting = 0;
  barrier.passed++;
  launch->threadgroup_barriers++;
  if (barrier.flags & 1) epoch[kDeviceSpace]++;  // mem_flags::mem_device
  if (barrier.flags & 2) epoch[kThreadgroupSpace]++;  // mem_flags::mem_threadgroup
}

MSL_CALLED unsigned msl_lane() { return current->lane; }

MSL_CALLED void msl_assert_failed(int) {
  raise_fault({.kind = "assertion", .code_address = (uint64_t)MSL_CALLER});
}

// For a test that the structures are equal on both sides.
MSL_EXPORT void msl_structure_bytes(uint64_t bytes[6]) {
  bytes[0] = sizeof(Launch);
  bytes[1] = sizeof(Buffer);
  bytes[2] = sizeof(Fault);
  bytes[3] = sizeof(RowRead);
  bytes[4] = sizeof(Variable);
  bytes[5] = sizeof(Event);
}

// Runs a whole launch. Returns 1 if a fault was recorded.
MSL_EXPORT int msl_launch(Launch* requested) {
  launch = requested;
  current = nullptr;
  memset(simdgroups, 0, sizeof simdgroups);
  for (uint32_t& e : epoch) e = 0;
  begin_checks();
  uint32_t groups[3];
  for (int axis = 0; axis < 3; axis++)
    groups[axis] = (launch->grid[axis] + launch->threadgroup[axis] - 1) / launch->threadgroup[axis];
  const uint32_t total = groups[0] * groups[1] * groups[2];
  launch->num_threadgroups = total;
  catch_signals();
  for (uint32_t n = 0; n < total && !launch->fault.kind; n++) {
    threadgroup_index = launch->order ? total - 1 - n : n;
    threadgroup_position[0] = threadgroup_index % groups[0];
    threadgroup_position[1] = threadgroup_index / groups[0] % groups[1];
    threadgroup_position[2] = threadgroup_index / groups[0] / groups[1];
    run_threadgroup();
  }
  release_signals();
  end_checks();
  return launch->fault.kind != nullptr;
}
