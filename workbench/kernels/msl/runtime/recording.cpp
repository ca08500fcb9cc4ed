// Records what chosen threadgroups do, in order: loads, stores, barriers, simd functions, watched values and the fault.
//
// The hooks run before an access, so the value of a store is copied when the next event comes: nothing of the kernel
// runs between a store and the next hook but the store itself.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace msl {

bool recording;

namespace {

uint16_t recorded_group;  // ordinal of the running threadgroup among the recorded ones
uint64_t event_capacity, payload_capacity;

// The latest store, of one event or, if it is long, of several that follow each other.
struct {
  uint64_t num_events, last_event;
  const char* address;
} pending_store;

void finish_store() {
  for (; pending_store.num_events; pending_store.num_events--) {
    Event& event = launch->events[pending_store.last_event + 1 - pending_store.num_events];
    memcpy(event.value, pending_store.address, event.bytes);
    pending_store.address += event.bytes;
  }
}

// Whether so many more bytes fit into the recording.
bool has_room(uint64_t bytes) {
  return launch->num_events * sizeof(Event) + launch->num_payload_bytes + bytes <= launch->max_recorded_bytes;
}

// A new event of the running thread, or null if the recording is full. The fault always has room.
Event* add_event(EventKind kind, const void* site, uint64_t payload_bytes = 0) {
  if (kind != kFaultEvent && (launch->num_events_left_out || !has_room(sizeof(Event) + payload_bytes))) {
    launch->num_events_left_out++;
    return nullptr;
  }
  if (launch->num_events == event_capacity) {
    event_capacity = event_capacity ? 2 * event_capacity : 4096;
    launch->events = (Event*)realloc(launch->events, event_capacity * sizeof(Event));
  }
  Event& event = launch->events[launch->num_events++];
  event = {};
  event.kind = kind;
  event.thread = current ? current->thread : 0;
  event.group = recorded_group;
  event.array = kNoArray;
  event.site = site ? (uint32_t)((const char*)site - &library_begin) : 0;
  return &event;
}

}  // namespace

void begin_recording() {
  recording = false;
  recorded_group = 0;
  event_capacity = payload_capacity = 0;
  pending_store = {};
}

bool begin_recorded_threadgroup() {
  recording = launch->recorded_threadgroups && launch->recorded_threadgroups[threadgroup_index];
  return recording;
}

void end_recorded_threadgroup() {
  if (!recording) return;
  finish_store();
  recording = false;
  recorded_group++;
}

void record_load_or_store(uint32_t array, int64_t offset, const void* address, uint32_t bytes, AccessKind kind,
                          bool takes_place, const void* site) {
  finish_store();
  for (uint32_t done = 0; done < bytes; done += sizeof(Event::value)) {
    const uint32_t part = bytes - done < sizeof(Event::value) ? bytes - done : sizeof(Event::value);
    Event* event = add_event((EventKind)kind, site);
    if (!event) return;
    event->bytes = part;
    event->array = array;
    event->offset = offset + done;
    event->has_value = takes_place;
    if (!takes_place) return;
    if (writes(kind))
      pending_store = {pending_store.num_events + 1, launch->num_events - 1, (const char*)address};
    else
      memcpy(event->value, (const char*)address + done, part);
  }
}

void record_barrier(EventKind kind, int flags, const void* site) {
  finish_store();
  if (Event* event = add_event(kind, site)) event->detail = flags;
}

void record_return() {
  finish_store();
  add_event(kReturn, nullptr);
}

uint32_t record_meeting(const char* operation, const void* site, const Simdgroup& simdgroup, uint32_t set,
                        uint32_t input_bytes, uint32_t result_bytes) {
  finish_store();
  const uint64_t bytes = input_bytes ? kSimdWidth * (input_bytes + result_bytes + 1) : 0;
  Event* event = add_event(input_bytes ? kSimdFunction : kSimdgroupBarrier, site, bytes);
  if (!event) return 0;
  event->offset = (int64_t)operation;
  event->detail = simdgroup.present[set];
  MeetingPlace place = {launch->num_payload_bytes, input_bytes, result_bytes};
  memcpy(event->value, &place, sizeof place);
  event->has_value = 1;
  if (!bytes) return 0;
  while (payload_capacity < launch->num_payload_bytes + bytes) {
    payload_capacity = payload_capacity ? 2 * payload_capacity : 1 << 16;
    launch->payload = (uint8_t*)realloc(launch->payload, payload_capacity);
  }
  uint8_t* to = launch->payload + launch->num_payload_bytes;
  for (uint32_t lane = 0; lane < kSimdWidth; lane++) memcpy(to + lane * input_bytes, simdgroup.slots[set][lane], input_bytes);
  memset(to + kSimdWidth * input_bytes, 0, kSimdWidth * result_bytes);
  memset(to + kSimdWidth * (input_bytes + result_bytes), kNoLane, kSimdWidth);
  launch->num_payload_bytes += bytes;
  return launch->num_events;
}

void record_result(uint32_t event_number, const void* value, uint32_t source_lane) {
  MeetingPlace place;
  memcpy(&place, launch->events[event_number - 1].value, sizeof place);
  uint8_t* to = launch->payload + place.start + kSimdWidth * place.input_bytes;
  memcpy(to + current->lane * place.result_bytes, value, place.result_bytes);
  to[kSimdWidth * place.result_bytes + current->lane] = source_lane < kSimdWidth ? source_lane : kNoLane;
}

void record_fault(const Fault& fault) {
  // A store that is at fault does not take place. A misaligned one is found before it is recorded.
  const bool is_access = fault.access_bytes && strcmp(fault.kind, "misaligned");
  const uint32_t site = (uint32_t)(fault.code_address - (uint64_t)&library_begin);
  if (pending_store.num_events && is_access && launch->events[pending_store.last_event].site == site)
    for (; pending_store.num_events; pending_store.num_events--)
      launch->events[pending_store.last_event + 1 - pending_store.num_events].has_value = 0;
  finish_store();
  Event* event = add_event(kFaultEvent, (const void*)fault.code_address);
  event->offset = (int64_t)fault.kind;
}

}  // namespace msl

using namespace msl;

MSL_CALLED void msl_watch(const char* name, int element_type, int bytes, const void* value) {
  if (!recording) return;
  finish_store();
  Event* event = add_event(kWatch, MSL_CALLER);
  if (!event) return;
  event->bytes = bytes;
  event->offset = (int64_t)name;
  event->detail = element_type;
  event->has_value = 1;
  memcpy(event->value, value, bytes);
}

MSL_EXPORT void msl_release_recording(Event* events, uint8_t* payload) {
  free(events);
  free(payload);
}
