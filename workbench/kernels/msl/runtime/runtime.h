// Shared by the files of the runtime: the structures of a launch (launch.py reads their fields here), the state of
// the threadgroup that is running, and the functions that the files call in one another.
//
//   fibers.cpp   threads as fibers, threadgroup_barrier, the loop over threadgroups
//   switch.cpp   the switch from one thread to another
//   simd.cpp     the meeting of a simdgroup's lanes, reductions, shuffles, 8x8 matrices
//   checks.cpp   every load and store: bounds, initialisation, counts; threadgroup variables
//   races.cpp    accesses of different threads that no barrier orders
//   recording.cpp  the events of chosen threadgroups, in order
//   signals.cpp  faults that the processor detects
//   hooks.cpp    functions called by the compiler's instrumentation, and atomic operations
//
// One threadgroup runs at a time, on one operating system thread.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../include/thread_attributes.h"

#define MSL_EXPORT extern "C" __attribute__((visibility("default")))
// Called by the kernel's code, which is linked into the same library.
#define MSL_CALLED extern "C"
#define MSL_COLD __attribute__((noinline, cold))
#define MSL_CALLER __builtin_return_address(0)

namespace msl {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxSimdgroups = kMaxThreads / kSimdWidth;
constexpr uint64_t kStackBytes = 128 << 10;
constexpr uint64_t kStackGuardBytes = 16 << 10;  // at the low end of each stack, with no access: launch.py
constexpr uint32_t kThreadgroupMemoryLimit = 32768;  // of every Apple GPU family
constexpr uint32_t kThreadgroupArenaBytes = 1 << 16;
constexpr uint32_t kRedZoneBytes = 64;  // between threadgroup variables
constexpr uint32_t kMaxThreadgroupVariables = 256;

// ---- the structures of a launch ----

struct Buffer {
  const char* name;
  uint64_t address;
  uint64_t bytes;
  uint32_t element_bytes;
  uint32_t is_output;
  uint32_t is_initialised;  // an output with an init_value
  uint32_t unused;
  uint64_t traced_row_bytes;  // 0: not traced
  // Counted by the launch.
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t distinct_bytes_read;  // each element once per threadgroup, summed over threadgroups
  uint64_t unwritten_bytes;
  uint64_t first_unwritten_byte;
};

struct Fault {
  const char* kind;  // null: no fault
  const char* object;  // buffer, variable or operation
  const char* other_object;
  uint64_t code_address;
  uint64_t other_code_address;
  int64_t byte_offset;
  uint64_t object_bytes;
  uint32_t access_bytes;
  uint32_t is_write;
  uint32_t other_is_write;
  uint32_t other_thread;
  uint32_t other_threadgroup;
  uint32_t has_thread;
  uint32_t thread_position_in_grid[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t line;    // of a report that states its place in the source
  uint32_t column;
  char file[128];
  char detail[768];
};

struct RowRead {
  uint32_t threadgroup;
  uint32_t buffer;
  uint64_t row;
};

// A variable in threadgroup memory, once the launch has placed it.
struct Variable {
  const char* name;
  uint32_t offset;
  uint32_t bytes;
  uint32_t element_bytes;
  uint32_t element_type;  // code of include/simd.h
  uint32_t granule_shift;
  uint32_t first_granule;
};

// A moment of a recorded threadgroup. `kind` is an AccessKind or an EventKind.
struct Event {
  uint8_t kind;
  uint8_t bytes;      // of the value
  uint8_t has_value;  // a store that is at fault does not take place, and a load out of bounds has no value
  uint8_t unused;
  uint16_t thread;    // in the threadgroup
  uint16_t group;     // ordinal among the recorded threadgroups
  uint32_t array;     // number of a buffer, kFirstVariable + number of a threadgroup variable, or kNoArray
  uint32_t site;      // place in the library
  uint32_t detail;    // barrier: mem_flags; simd function: the lanes that take part; watched value: its type
  uint32_t unused_too;
  int64_t offset;     // access: byte of the array; simd function, watched value, fault: address of its name
  uint8_t value[16];  // simd function: a MeetingPlace
};

using Entry = void (*)(const uint64_t* arguments, const msl_thread_attributes* attributes);

struct Launch {
  Entry entry;
  const uint64_t* arguments;
  uint32_t grid[3];
  uint32_t threadgroup[3];
  Buffer* buffers;
  uint32_t num_buffers;
  uint32_t order;  // 0: threads and threadgroups in ascending order, 1: descending
  uint32_t checks;
  uint32_t statistics;
  uint64_t arena_address;
  uint64_t arena_slot_shift;
  uint64_t threadgroup_memory;
  uint64_t stacks;
  double time_limit_seconds;
  // Counted by the launch.
  uint64_t num_threadgroups;
  uint64_t accesses;
  uint64_t fiber_switches;
  uint64_t threadgroup_barriers;
  uint64_t simdgroup_barriers;
  uint64_t simd_operations;
  uint64_t matrix_multiplications;
  uint64_t threadgroup_memory_bytes;
  uint64_t threadgroup_bytes_read;
  uint64_t threadgroup_bytes_written;
  RowRead* rows_read;
  uint64_t num_rows_read;
  // Recorded by the launch, if there are threadgroups to record.
  const uint8_t* recorded_threadgroups;  // one byte each, 1: recorded; null: none
  uint64_t max_recorded_bytes;
  Event* events;
  uint64_t num_events;
  uint64_t num_events_left_out;
  uint8_t* payload;  // values of the lanes that met in simd functions
  uint64_t num_payload_bytes;
  Variable* variables;
  uint64_t num_variables;
  Fault fault;
};

// ---- the state of the running threadgroup ----

// Barriers order threadgroup memory, device memory or both. An epoch of a memory ends with a barrier that orders it.
enum Space : uint32_t { kThreadgroupSpace, kDeviceSpace, kNumSpaces };

struct Fiber {
  void* stack_pointer;
  uint64_t stack;  // lowest address
  uint32_t thread;  // in the threadgroup
  uint32_t simdgroup;
  uint32_t lane;
  uint64_t uniform_trail;  // digest of this thread's calls of simdgroup_load and simdgroup_store
  msl_thread_attributes attributes;
};

struct Simdgroup {
  uint32_t lanes;     // mask of the lanes that exist
  uint32_t alive;     // mask of the lanes that have not returned
  uint32_t runnable;  // mask of the lanes that do not wait
  uint32_t waiting;   // mask of the lanes that wait in a simd operation
  const char* operation;
  const void* site;
  uint64_t meetings;
  uint32_t epoch[kNumSpaces];  // ended by simdgroup_barrier
  // Inputs and results of the meeting in progress and of the one before it, whose results slower lanes still read.
  alignas(16) uint8_t slots[2][kSimdWidth][32];
  alignas(16) uint8_t results[2][kSimdWidth][16];
  uint32_t present[2];
  uint32_t recorded[2];  // number + 1 of the meeting's event; 0: none
};

extern Launch* launch;
extern Fiber fibers[kMaxThreads];
extern Simdgroup simdgroups[kMaxSimdgroups];
extern Fiber* current;  // null outside threads
extern uint32_t num_threads, num_simdgroups, num_returned;
extern uint32_t epoch[kNumSpaces];  // ended by threadgroup_barrier; never repeats within a launch
extern uint32_t threadgroup_index;  // linear, in the grid

// ---- switch.cpp ----

// Stores the stack pointer of the running thread and continues the other one at the point where it stopped.
extern "C" void msl_switch_fiber(void** save_stack_pointer, void* to_stack_pointer);

// ---- fibers.cpp ----

// Records a fault and ends all threads; returns only if no thread is running.
MSL_COLD void raise_fault(const Fault& fault);
// Switches to another runnable thread; the caller has marked itself as not runnable.
void wait_for_others(const void* site);

// ---- simd.cpp ----

void lane_returned();
// Whether all lanes have made the same calls of simdgroup_load and simdgroup_store.
bool trails_agree(const Simdgroup& simdgroup);

// ---- races.cpp ----

enum AccessKind : uint32_t { kRead, kWrite, kAtomicLoad, kAtomicStore, kAtomicUpdate };
inline bool reads(AccessKind kind) { return kind != kWrite && kind != kAtomicStore; }
inline bool writes(AccessKind kind) { return kind != kRead && kind != kAtomicLoad; }
inline bool is_atomic(AccessKind kind) { return kind >= kAtomicLoad; }

// The place of an access in the library (22 bits) and its thread (10 bits).
struct Origin {
  uint32_t bits;
  uint32_t thread() const { return bits % kMaxThreads; }
  uint32_t site() const { return bits / kMaxThreads; }
};

// The last plain write to a granule of memory.
struct Writer {
  uint32_t threadgroup;  // index + 1; 0: none
  uint32_t epoch, simdgroup_epoch;
  Origin origin;
};

// The threads that accessed a granule, other than by a plain write, in the latest epoch with such an access.
struct Visitors {
  uint32_t threadgroup;          // index + 1 of the latest; 0: none
  uint32_t earlier_threadgroup;  // index + 1 of another one before it; 0: none
  uint32_t epoch, simdgroup_epoch;
  uint32_t simdgroups;  // mask
  uint32_t lanes;       // mask, of the latest simdgroup in its latest epoch
  Origin origin;        // of the latest
};

// The recorded accesses to the granules of a piece of memory; `readers` and `atomics` are allocated on first use.
struct AccessHistory {
  Space space;
  uint64_t num_granules;
  Writer* writers;
  Visitors* readers;
  Visitors* atomics;
};

// A conflicting earlier access; `earlier` is null if there is none.
struct Conflict {
  const char* earlier;  // "write", "read", "atomic access"
  uint32_t threadgroup;
  Origin origin;
};
Conflict record_access(AccessHistory& history, uint64_t granule, AccessKind kind, const void* site);
AccessHistory new_history(Space space, uint64_t num_granules);
void release_history(AccessHistory& history);
// The code address of an origin.
uint64_t code_address(Origin origin);

// The first byte of this library and the one behind its last, which the linker provides.
#if defined(__APPLE__)
extern "C" __attribute__((visibility("hidden"))) char library_begin __asm__("__mh_dylib_header");
extern "C" __attribute__((visibility("hidden"))) char library_end __asm__("segment$end$__DATA");
#else
extern "C" __attribute__((visibility("hidden"))) char library_begin __asm__("__ehdr_start");
extern "C" __attribute__((visibility("hidden"))) char library_end __asm__("_end");
#endif

// ---- checks.cpp ----

constexpr uint32_t kMaxBuffers = 32;
constexpr uint64_t kAccessesBetweenClocks = 1 << 16;

// Number of bytes of each buffer that a plain read may touch without further checks or counts; 0 for outputs.
extern uint64_t freely_readable_bytes[kMaxBuffers + 1];
void check_access_in_full(uint64_t address, uint32_t bytes, AccessKind kind, const void* site);
// Ends a launch that has exceeded its time limit.
void check_time(const void* site);

// Called for every load and store of the kernel.
inline void check_access(void* pointer, uint32_t bytes, AccessKind kind, const void* site) {
  const uint64_t address = (uint64_t)pointer;
  if (!current || address - current->stack < kStackBytes) return;
  if (++launch->accesses % kAccessesBetweenClocks == 0) check_time(site);
  const uint64_t slot = (address - launch->arena_address) >> launch->arena_slot_shift;
  if (kind == kRead && slot < launch->num_buffers) {
    const uint64_t offset = address - launch->buffers[slot].address;
    if (offset < freely_readable_bytes[slot] && offset + bytes <= freely_readable_bytes[slot]) return;
  }
  check_access_in_full(address, bytes, kind, site);
}

void begin_checks();
void begin_threadgroup_checks();
void end_checks();

// ---- recording.cpp ----

enum EventKind : uint32_t {
  kBarrierWait = 8,  // a thread arrives at threadgroup_barrier
  kBarrierPassed,
  kSimdgroupBarrier,
  kSimdFunction,  // all lanes of a simdgroup at once
  kWatch,
  kReturn,
  kFaultEvent,
};
constexpr uint32_t kFirstVariable = 256, kNoArray = ~0u;
constexpr uint8_t kNoLane = 255;

// The place of a meeting's values in the payload: for each of 32 lanes its input, then for each its result, then for each
// the lane whose value it read, or kNoLane.
struct MeetingPlace {
  uint64_t start;
  uint32_t input_bytes, result_bytes;
};

extern bool recording;  // the running threadgroup is recorded
void begin_recording();
bool begin_recorded_threadgroup();
void end_recorded_threadgroup();
void record_load_or_store(uint32_t array, int64_t offset, const void* address, uint32_t bytes, AccessKind kind,
                          bool takes_place, const void* site);
void record_barrier(EventKind kind, int flags, const void* site);
void record_return();
// Returns the number + 1 of the event, 0 if it was left out or has no results.
uint32_t record_meeting(const char* operation, const void* site, const Simdgroup& simdgroup, uint32_t set,
                        uint32_t input_bytes, uint32_t result_bytes);
void record_result(uint32_t event_number, const void* value, uint32_t source_lane);
void record_fault(const Fault& fault);

// ---- signals.cpp ----

// While a kernel runs, a signal from the processor is a fault of the kernel.
void catch_signals();
void release_signals();

}  // namespace msl
