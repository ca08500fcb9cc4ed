// Every load and store of a kernel: bounds, initialisation, races, and the counts of a launch.
//
// All memory that a kernel may address lies in one reserved range of addresses, cut into slots of equal size: one per
// buffer and one for threadgroup memory. A buffer lies in the middle of its slot, so the slot of an address says which
// buffer was meant, even if the index is wrong by gigabytes, and the bounds check is one comparison.
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "runtime.h"

namespace msl {

namespace {

double started_seconds;

Variable variables[kMaxThreadgroupVariables];
uint32_t num_variables;           // declared so far in this launch
uint32_t threadgroup_bytes_used;  // red zones included
uint32_t threadgroup_granules_used;
uint8_t variable_at[kThreadgroupArenaBytes / 16];  // number + 1, for every 16 bytes
uint8_t is_written[kThreadgroupArenaBytes];
AccessHistory threadgroup_history;

// The state of a buffer while a launch runs.
struct BufferState {
  uint8_t* is_written;   // outputs: one per byte
  AccessHistory history; // outputs
  uint32_t granule_shift;
  uint32_t* last_reader;       // per element: threadgroup index + 1
  uint32_t* last_row_reader;   // per traced row: threadgroup index + 1
};
BufferState* states;
uint64_t row_capacity;

double now_seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Races are detected per granule: an element, or 4 bytes if that is less.
uint32_t granule_shift_of(uint64_t element_bytes) { return element_bytes % 4 == 0 ? 2 : element_bytes % 2 == 0 ? 1 : 0; }

// Whether each of `count` marks is 1.
inline bool all_marked(const uint8_t* marks, uint32_t count) {
  if (count == 4) {
    uint32_t four;
    memcpy(&four, marks, sizeof four);
    return four == 0x01010101;
  }
  return !memchr(marks, 0, count);
}

Fault access_fault(const char* kind, const char* object, int64_t offset, uint64_t object_bytes, uint32_t bytes,
                   AccessKind access, const void* site) {
  return {.kind = kind, .object = object, .code_address = (uint64_t)site, .byte_offset = offset,
          .object_bytes = object_bytes, .access_bytes = bytes, .is_write = writes(access)};
}

MSL_COLD void raise_race(Fault fault, const Conflict& conflict) {
  fault.detail[0] = 0;
  strncat(fault.detail, conflict.earlier, sizeof fault.detail - 1);
  fault.other_is_write = conflict.earlier[0] == 'w';
  fault.other_thread = conflict.origin.thread();
  fault.other_threadgroup = conflict.threadgroup;
  fault.other_code_address = code_address(conflict.origin);
  raise_fault(fault);
}

// ---- threadgroup memory ----

void check_threadgroup_access(uint32_t offset, uint32_t bytes, AccessKind kind, const void* site) {
  const uint32_t number = variable_at[offset / 16];
  const Variable* variable = number ? &variables[number - 1] : nullptr;
  const bool is_inside = variable && offset >= variable->offset && offset + bytes <= variable->offset + variable->bytes;
  if (recording && variable)
    record_load_or_store(kFirstVariable + number - 1, (int64_t)offset - variable->offset,
                         (const char*)launch->threadgroup_memory + offset, bytes, kind, is_inside, site);
  if (!is_inside) {
    // In a red zone: report the nearest variable before it, or the first one.
    for (uint32_t v = 0; v < num_variables; v++)
      if (variables[v].bytes && (!variable || (variables[v].offset <= offset && variables[v].offset > variable->offset)))
        variable = &variables[v];
    raise_fault(variable ? access_fault("threadgroup out of bounds", variable->name, (int64_t)offset - variable->offset,
                                        variable->bytes, bytes, kind, site)
                         : access_fault("threadgroup out of bounds", "", offset, 0, bytes, kind, site));
    return;
  }
  const uint32_t inside = offset - variable->offset;
  if (reads(kind) && !all_marked(&is_written[offset], bytes))
    raise_fault(access_fault("threadgroup uninitialised", variable->name, inside, variable->bytes, bytes, kind, site));
  if (writes(kind)) memset(&is_written[offset], 1, bytes);
  const uint32_t first = variable->first_granule;
  for (uint32_t g = inside >> variable->granule_shift; g <= (inside + bytes - 1) >> variable->granule_shift; g++)
    if (const Conflict conflict = record_access(threadgroup_history, first + g, kind, site); conflict.earlier)
      raise_race(access_fault("threadgroup race", variable->name, inside, variable->bytes, bytes, kind, site), conflict);
}

// ---- buffers ----

void count_rows(uint32_t number, uint64_t offset, uint32_t bytes) {
  const Buffer& buffer = launch->buffers[number];
  BufferState& state = states[number];
  for (uint64_t row = offset / buffer.traced_row_bytes; row <= (offset + bytes - 1) / buffer.traced_row_bytes; row++) {
    if (state.last_row_reader[row] == threadgroup_index + 1) continue;
    state.last_row_reader[row] = threadgroup_index + 1;
    if (launch->num_rows_read == row_capacity) {
      row_capacity = row_capacity ? 2 * row_capacity : 1024;
      launch->rows_read = (RowRead*)realloc(launch->rows_read, row_capacity * sizeof(RowRead));
    }
    launch->rows_read[launch->num_rows_read++] = {threadgroup_index, number, row};
  }
}

void count_access(uint32_t number, uint64_t offset, uint32_t bytes, AccessKind kind) {
  Buffer& buffer = launch->buffers[number];
  if (writes(kind)) buffer.bytes_written += bytes;
  if (!reads(kind)) return;
  buffer.bytes_read += bytes;
  BufferState& state = states[number];
  const uint32_t element = buffer.element_bytes;
  for (uint64_t e = offset / element; e <= (offset + bytes - 1) / element; e++)
    if (state.last_reader[e] != threadgroup_index + 1) {
      state.last_reader[e] = threadgroup_index + 1;
      buffer.distinct_bytes_read += element;
    }
  if (buffer.traced_row_bytes) count_rows(number, offset, bytes);
}

void check_output_access(uint32_t number, uint64_t offset, uint32_t bytes, AccessKind kind, const void* site) {
  const Buffer& buffer = launch->buffers[number];
  BufferState& state = states[number];
  if (reads(kind) && !all_marked(state.is_written + offset, bytes))
    raise_fault(access_fault("output read before written", buffer.name, offset, buffer.bytes, bytes, kind, site));
  if (writes(kind)) memset(state.is_written + offset, 1, bytes);
  for (uint64_t g = offset >> state.granule_shift; g <= (offset + bytes - 1) >> state.granule_shift; g++)
    if (const Conflict conflict = record_access(state.history, g, kind, site); conflict.earlier)
      raise_race(access_fault("device race", buffer.name, offset, buffer.bytes, bytes, kind, site), conflict);
}

MSL_COLD void raise_wild_access(uint64_t address, uint32_t bytes, AccessKind kind, const void* site) {
  raise_fault(access_fault("wild access", "", (int64_t)address, 0, bytes, kind, site));
}

}  // namespace

uint64_t freely_readable_bytes[kMaxBuffers + 1];

void check_time(const void* site) {
  if (launch->time_limit_seconds > 0 && now_seconds() - started_seconds > launch->time_limit_seconds)
    raise_fault({.kind = "time limit", .code_address = (uint64_t)site});
}

void check_access_in_full(uint64_t address, uint32_t bytes, AccessKind kind, const void* site) {
  const uint64_t slot = (address - launch->arena_address) >> launch->arena_slot_shift;
  if (slot < launch->num_buffers) {
    const Buffer& buffer = launch->buffers[slot];
    const uint64_t offset = address - buffer.address;
    const bool is_inside = offset < buffer.bytes && offset + bytes <= buffer.bytes;
    if (recording) {
      const bool takes_place = is_inside && (buffer.is_output || !writes(kind));
      record_load_or_store(slot, offset, (const void*)address, bytes, kind, takes_place, site);
    }
    if (!is_inside) {
      raise_fault(
          access_fault("out of bounds", buffer.name, (int64_t)offset, buffer.bytes, bytes, kind, site));
      return;
    }
    if (launch->statistics) count_access(slot, offset, bytes, kind);
    if (buffer.is_output)
      check_output_access(slot, offset, bytes, kind, site);
    else if (writes(kind))
      raise_fault(access_fault("write to input", buffer.name, (int64_t)offset, buffer.bytes, bytes, kind, site));
    return;
  }
  if (slot == launch->num_buffers) {
    const int64_t offset = (int64_t)(address - launch->threadgroup_memory);
    if (reads(kind)) launch->threadgroup_bytes_read += bytes;
    if (writes(kind)) launch->threadgroup_bytes_written += bytes;
    if (offset < 0 || offset + bytes > kThreadgroupArenaBytes) {
      const Variable& nearest = variables[offset < 0 || !num_variables ? 0 : num_variables - 1];
      raise_fault(access_fault("threadgroup out of bounds", num_variables ? nearest.name : "",
                               offset - (int64_t)nearest.offset, nearest.bytes, bytes, kind, site));
      return;
    }
    check_threadgroup_access(offset, bytes, kind, site);
    return;
  }
  // The program's constants lie in this library.
  const bool is_constant = address >= (uint64_t)&library_begin && address + bytes <= (uint64_t)&library_end;
  if (!is_constant) raise_wild_access(address, bytes, kind, site);
}

static uint64_t bytes_free_to_read(const Buffer& buffer) {
  return buffer.is_output || launch->statistics || recording ? 0 : buffer.bytes;
}

void begin_checks() {
  started_seconds = now_seconds();
  num_variables = threadgroup_bytes_used = threadgroup_granules_used = 0;
  memset(variables, 0, sizeof variables);
  memset(variable_at, 0, sizeof variable_at);
  row_capacity = 0;
  begin_recording();
  if (!launch->checks) return;
  threadgroup_history = new_history(kThreadgroupSpace, kThreadgroupArenaBytes);
  states = (BufferState*)calloc(launch->num_buffers + 1, sizeof(BufferState));
  for (uint32_t number = 0; number < launch->num_buffers; number++) {
    const Buffer& buffer = launch->buffers[number];
    BufferState& state = states[number];
    if (buffer.is_output) {
      state.is_written = (uint8_t*)malloc(buffer.bytes + 1);
      memset(state.is_written, buffer.is_initialised ? 1 : 0, buffer.bytes);
      state.granule_shift = granule_shift_of(buffer.element_bytes);
      state.history = new_history(kDeviceSpace, (buffer.bytes >> state.granule_shift) + 1);
    }
    freely_readable_bytes[number] = bytes_free_to_read(buffer);
    if (launch->statistics)
      state.last_reader = (uint32_t*)calloc(buffer.bytes / buffer.element_bytes + 1, sizeof(uint32_t));
    if (buffer.traced_row_bytes)
      state.last_row_reader = (uint32_t*)calloc(buffer.bytes / buffer.traced_row_bytes + 1, sizeof(uint32_t));
  }
}

// When a threadgroup starts, its memory holds the bit pattern of a NaN and every byte counts as unwritten.
void begin_threadgroup_checks() {
  memset((void*)launch->threadgroup_memory, 0xff, threadgroup_bytes_used);
  memset(is_written, 0, threadgroup_bytes_used);
  if (!launch->recorded_threadgroups) return;
  begin_recorded_threadgroup();
  for (uint32_t number = 0; number < launch->num_buffers; number++)
    freely_readable_bytes[number] = bytes_free_to_read(launch->buffers[number]);
}

void end_checks() {
  launch->variables = variables;
  launch->num_variables = num_variables;
  if (!launch->checks) return;
  for (uint32_t number = 0; number < launch->num_buffers; number++) {
    Buffer& buffer = launch->buffers[number];
    BufferState& state = states[number];
    if (buffer.is_output)
      for (uint64_t byte = 0; byte < buffer.bytes; byte++)
        if (!state.is_written[byte] && !buffer.unwritten_bytes++) buffer.first_unwritten_byte = byte;
    if (buffer.unwritten_bytes) {
      Fault fault = {.kind = "output not written", .object = buffer.name};
      fault.byte_offset = (int64_t)buffer.first_unwritten_byte;
      fault.object_bytes = buffer.bytes;
      raise_fault(fault);
    }
    free(state.is_written);
    free(state.last_reader);
    free(state.last_row_reader);
    release_history(state.history);
  }
  free(states);
  states = nullptr;
  release_history(threadgroup_history);
}

}  // namespace msl

using namespace msl;

// The address of a threadgroup variable. Every thread calls this; the first call of a launch places the variable.
MSL_CALLED void* msl_threadgroup_variable(int number, uint64_t bytes, uint64_t element_bytes, int element_type,
                                          const char* name) {
  Variable& variable = variables[number];
  if (!variable.bytes) {
    launch->threadgroup_memory_bytes += bytes;
    const uint32_t offset = (threadgroup_bytes_used + kRedZoneBytes + 15) / 16 * 16;
    if (launch->threadgroup_memory_bytes > kThreadgroupMemoryLimit || offset + bytes > kThreadgroupArenaBytes) {
      Fault fault = {.kind = "threadgroup memory", .object = name, .code_address = (uint64_t)MSL_CALLER};
      fault.object_bytes = launch->threadgroup_memory_bytes;
      raise_fault(fault);
    }
    const uint32_t granule_shift = granule_shift_of(element_bytes);
    variable = {name, offset, (uint32_t)bytes, (uint32_t)element_bytes, (uint32_t)element_type, granule_shift,
                threadgroup_granules_used};
    threadgroup_bytes_used = offset + bytes;
    threadgroup_granules_used += bytes >> granule_shift;
    num_variables = number + 1u > num_variables ? number + 1 : num_variables;
    memset(&variable_at[offset / 16], number + 1, (bytes + 15) / 16);
    memset(&is_written[offset], 0, bytes);
    memset((char*)launch->threadgroup_memory + offset, 0xff, bytes);
  }
  return (char*)launch->threadgroup_memory + variable.offset;
}

MSL_EXPORT void msl_release_rows(RowRead* rows) { free(rows); }

MSL_EXPORT uint64_t msl_library_address() { return (uint64_t)&library_begin; }
