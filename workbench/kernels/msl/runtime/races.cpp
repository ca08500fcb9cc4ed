// Finds accesses of different threads to the same memory that no barrier orders.
//
// Two accesses conflict when at least one of them writes, not both are atomic, they come from different threads, and
// - they come from different threadgroups (device memory: nothing orders threadgroups within a launch), or
// - no threadgroup_barrier for that memory lies between them, nor, for lanes of one simdgroup, a simdgroup_barrier.
//
// It is enough to record the last plain writer, the plain readers and the atomic visitors of each granule since the
// last barrier. Of an unordered pair, the second access always finds the mark of the first, because any access that replaced
// the mark would have conflicted with it.
#include <cstdlib>

#include "runtime.h"


namespace msl {

namespace {

Origin here(const void* site) {
  return {(uint32_t)((const char*)site - &library_begin) * kMaxThreads + current->thread};
}

bool conflicts(const Writer& writer, Space space) {
  if (!writer.threadgroup) return false;
  if (writer.threadgroup != threadgroup_index + 1) return space == kDeviceSpace;
  const uint32_t thread = writer.origin.thread();
  if (thread == current->thread || writer.epoch != epoch[space]) return false;
  if (thread / kSimdWidth != current->simdgroup) return true;
  return writer.simdgroup_epoch == simdgroups[current->simdgroup].epoch[space];
}

bool conflicts(const Visitors& visitors, Space space) {
  if (!visitors.threadgroup) return false;
  if (space == kDeviceSpace && (visitors.threadgroup != threadgroup_index + 1 || visitors.earlier_threadgroup))
    return true;
  if (visitors.threadgroup != threadgroup_index + 1 || visitors.epoch != epoch[space]) return false;
  if (visitors.simdgroups & ~(1u << current->simdgroup)) return true;
  // Only this simdgroup has accessed the granule, so the lanes are its own.
  return visitors.simdgroup_epoch == simdgroups[current->simdgroup].epoch[space] &&
         (visitors.lanes & ~(1u << current->lane));
}

void add(Visitors& visitors, Space space, const void* site) {
  const uint32_t own_epoch = simdgroups[current->simdgroup].epoch[space];
  const uint32_t own_threadgroup = threadgroup_index + 1;
  if (visitors.threadgroup && visitors.threadgroup != own_threadgroup)
    visitors.earlier_threadgroup = visitors.threadgroup;
  if (visitors.threadgroup != own_threadgroup || visitors.epoch != epoch[space]) {
    visitors.threadgroup = own_threadgroup;
    visitors.epoch = epoch[space];
    visitors.simdgroups = visitors.lanes = 0;
  }
  const bool same_simdgroup = visitors.origin.thread() / kSimdWidth == current->simdgroup;
  if (!same_simdgroup || visitors.simdgroup_epoch != own_epoch) visitors.lanes = 0;
  visitors.simdgroup_epoch = own_epoch;
  visitors.simdgroups |= 1u << current->simdgroup;
  visitors.lanes |= 1u << current->lane;
  visitors.origin = here(site);
}

Visitors& visitors_of(Visitors*& all, const AccessHistory& history, uint64_t granule) {
  if (!all) all = (Visitors*)calloc(history.num_granules, sizeof(Visitors));
  return all[granule];
}

template <class Mark>
Conflict with(const char* earlier, const Mark& mark) {
  uint32_t threadgroup = mark.threadgroup - 1;
  if constexpr (__is_same(Mark, Visitors))
    if (threadgroup == threadgroup_index && mark.earlier_threadgroup) threadgroup = mark.earlier_threadgroup - 1;
  return {earlier, threadgroup, mark.origin};
}

}  // namespace

Conflict record_access(AccessHistory& history, uint64_t granule, AccessKind kind, const void* site) {
  const Space space = history.space;
  Writer& writer = history.writers[granule];
  if (conflicts(writer, space)) return with("write", writer);
  if (writes(kind) && history.readers && conflicts(history.readers[granule], space))
    return with("read", history.readers[granule]);
  if (!is_atomic(kind) && history.atomics && conflicts(history.atomics[granule], space))
    return with("atomic access", history.atomics[granule]);

  const uint32_t own_epoch = simdgroups[current->simdgroup].epoch[space];
  if (kind == kWrite)
    writer = {threadgroup_index + 1, epoch[space], own_epoch, here(site)};
  else if (kind == kRead)
    add(visitors_of(history.readers, history, granule), space, site);
  else if (kind != kAtomicLoad)
    add(visitors_of(history.atomics, history, granule), space, site);
  return {};
}

AccessHistory new_history(Space space, uint64_t num_granules) {
  return {space, num_granules, (Writer*)calloc(num_granules, sizeof(Writer)), nullptr, nullptr};
}

void release_history(AccessHistory& history) {
  free(history.writers);
  free(history.readers);
  free(history.atomics);
  history = {};
}

uint64_t code_address(Origin origin) { return (uint64_t)&library_begin + origin.site(); }

}  // namespace msl
