// Operations that the lanes of a simdgroup perform together.
#include <cstdio>
#include <cstring>

#include "runtime.h"

// Clang calls this for float to bfloat if the processor has no instruction for it; older compiler libraries lack it.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value);

namespace msl {

bool trails_agree(const Simdgroup& simdgroup) {
  const Fiber* lanes = &fibers[(&simdgroup - simdgroups) * kSimdWidth];
  for (uint32_t lane = 1; lane < kSimdWidth; lane++)
    if ((simdgroup.lanes >> lane & 1) && lanes[lane].uniform_trail != lanes[0].uniform_trail) return false;
  return true;
}

namespace {

Simdgroup& own_simdgroup() { return simdgroups[current->simdgroup]; }

void copy_value(void* to, const void* from, int bytes) {
  if (bytes == 4)
    memcpy(to, from, 4);  // inlined
  else
    memcpy(to, from, bytes);
}

void hand_in(const void* value, int bytes) {
  Simdgroup& s = own_simdgroup();
  copy_value(s.slots[s.meetings & 1][current->lane], value, bytes);
}

// Called by every live lane with its value in its slot; the last lane computes the results for all of them. Returns the
// index of the set of slots and results that belongs to this meeting. A recording keeps the lanes' values, of the given
// sizes.
template <class Finish>
__attribute__((always_inline)) inline uint32_t meet(const char* operation, const void* site, uint32_t input_bytes,
                                                    uint32_t result_bytes, Finish finish) {
  Simdgroup& s = own_simdgroup();
  const uint32_t set = s.meetings & 1, bit = 1u << current->lane;
  if (launch->checks && s.alive != s.lanes) {
    Fault fault = {.kind = "simd after return", .object = operation, .code_address = (uint64_t)site};
    snprintf(fault.detail, sizeof fault.detail, "%d of %d lanes", __builtin_popcount(s.lanes & ~s.alive),
             __builtin_popcount(s.lanes));
    raise_fault(fault);
  }
  if (!s.waiting) {
    s.operation = operation;
    s.site = site;
  } else if (launch->checks && s.site != site) {
    raise_fault({.kind = "different simd operations", .object = operation, .other_object = s.operation,
                 .code_address = (uint64_t)site, .other_code_address = (uint64_t)s.site});
  }
  s.waiting |= bit;
  if (s.waiting != s.alive) {
    const uint64_t meeting = s.meetings;
    s.runnable &= ~bit;
    while (s.meetings == meeting) wait_for_others(site);
    return set;
  }
  if (launch->checks && !trails_agree(s))
    raise_fault({.kind = "partial simdgroup", .object = "simdgroup_load or simdgroup_store",
                 .code_address = (uint64_t)site});
  s.present[set] = s.alive;
  finish(s, set);
  s.recorded[set] = recording ? record_meeting(operation, site, s, set, input_bytes, result_bytes) : 0;
  s.waiting = 0;
  s.meetings++;
  s.runnable = s.alive;
  return set;
}

// Called by every lane after a meeting.
inline void keep_result(uint32_t set, const void* value, uint32_t source_lane = kNoLane) {
  if (const uint32_t event = own_simdgroup().recorded[set]) record_result(event, value, source_lane);
}

// ---- element types: codes as in include/simd.h ----

struct Half {
  _Float16 value;
  operator float() const { return (float)value; }
  Half() = default;
  Half(float f) : value((_Float16)f) {}
};

struct Bfloat {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, sizeof f);
    return f;
  }
  Bfloat() = default;
  Bfloat(float f) {
    uint32_t wide;
    memcpy(&wide, &f, sizeof wide);
    if (f != f) wide |= 0x400000;  // stays a NaN
    else wide += 0x7fff + (wide >> 16 & 1);
    bits = wide >> 16;
  }
};

template <class Body>
void with_element_type(int code, Body body) {
  switch (code) {
    case 0: return body(float());
    case 1: return body(Half());
    case 2: return body(Bfloat());
    case 3: return body(int32_t());
    case 4: return body(uint32_t());
    case 5: return body(int16_t());
    case 6: return body(uint16_t());
    case 7: return body(int8_t());
    default: return body(uint8_t());
  }
}

// half and bfloat are combined in float and rounded once, at the end.
template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<Half> {
  using type = float;
};
template <>
struct Accumulator<Bfloat> {
  using type = float;
};
template <class T>
constexpr bool is_integer = (T)0.5f == (T)0;

// Codes as in include/simd.h.
template <class A>
A combine(int operation, A a, A b) {
  switch (operation) {
    case 0: return (A)(a + b);
    case 1: return a > b || b != b ? a : b;
    case 2: return a < b || b != b ? a : b;
    case 3: return (A)(a * b);
  }
  if constexpr (is_integer<A>) switch (operation) {
      case 4: return (A)(a & b);
      case 5: return (A)(a | b);
      case 6: return (A)(a ^ b);
    }
  __builtin_trap();
}

template <class T>
typename Accumulator<T>::type slot_value(const Simdgroup& s, uint32_t set, uint32_t lane) {
  T value;
  memcpy(&value, s.slots[set][lane], sizeof value);
  return (typename Accumulator<T>::type)value;
}

// Combines in halves, as hardware does; absent lanes are left out.
template <class T>
T reduce(const Simdgroup& s, uint32_t set, int operation) {
  using A = typename Accumulator<T>::type;
  A values[kSimdWidth];
  uint32_t present = s.present[set];
  for (uint32_t lane = 0; lane < kSimdWidth; lane++)
    if (present >> lane & 1) values[lane] = slot_value<T>(s, set, lane);
  for (uint32_t half = kSimdWidth / 2; half; half /= 2)
    for (uint32_t lane = 0; lane < half; lane++) {
      const bool low = present >> lane & 1, high = present >> (lane + half) & 1;
      if (high) values[lane] = low ? combine(operation, values[lane], values[lane + half]) : values[lane + half];
      if (high) present |= 1u << lane;
    }
  return (T)values[0];
}

// This lane's two elements of an 8x8 matrix: row and first column, as in include/simdgroup_matrix.h.
void position_of_lane(uint32_t lane, uint32_t& row, uint32_t& column) {
  const uint32_t quad = lane / 4;
  row = (quad & 4) + (lane / 2) % 4;
  column = (quad & 2) * 2 + (lane % 2) * 2;
}

void multiply_accumulate(Simdgroup& s, uint32_t set) {
  float a[8][8], b[8][8], c[8][8];
  for (uint32_t lane = 0; lane < kSimdWidth; lane++) {
    uint32_t row, column;
    position_of_lane(lane, row, column);
    const float* elements = (const float*)s.slots[set][lane];
    for (int i = 0; i < 2; i++) {
      a[row][column + i] = elements[i];
      b[row][column + i] = elements[2 + i];
      c[row][column + i] = elements[4 + i];
    }
  }
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 8; k++)
      for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (uint32_t lane = 0; lane < kSimdWidth; lane++) {
    uint32_t row, column;
    position_of_lane(lane, row, column);
    memcpy(s.results[set][lane], &c[row][column], 2 * sizeof(float));
  }
}

}  // namespace

// The current thread has returned.
void lane_returned() {
  Simdgroup& s = own_simdgroup();
  s.alive &= ~(1u << current->lane);
  if (s.waiting && s.waiting == s.alive)
    raise_fault({.kind = "return past simd", .object = s.operation, .code_address = (uint64_t)s.site});
}

}  // namespace msl

using namespace msl;

extern "C" __bf16 __truncsfbf2(float value) { return __builtin_bit_cast(__bf16, Bfloat(value).bits); }

MSL_CALLED void msl_simdgroup_barrier(int flags) {
  meet("simdgroup_barrier", MSL_CALLER, 0, 0, [=](Simdgroup& s, uint32_t) {
    launch->simdgroup_barriers++;
    if (flags & 1) s.epoch[kDeviceSpace]++;
    if (flags & 2) s.epoch[kThreadgroupSpace]++;
  });
}

// simdgroup_load and simdgroup_store need no values from other lanes, so no lane waits here. The next meeting checks
// that every lane made the same calls.
MSL_CALLED void msl_simd_uniform(const char*) {
  current->uniform_trail = current->uniform_trail * 1099511628211ull + (uint64_t)MSL_CALLER;
}

MSL_CALLED void msl_simd_reduce(const char* operation, int combination, int element_type, int bytes, void* value) {
  hand_in(value, bytes);
  const uint32_t set = meet(operation, MSL_CALLER, bytes, bytes, [=](Simdgroup& s, uint32_t set) {
    launch->simd_operations++;
    with_element_type(element_type, [&](auto example) {
      const auto result = reduce<decltype(example)>(s, set, combination);
      memcpy(s.results[set][0], &result, sizeof result);
    });
  });
  copy_value(value, own_simdgroup().results[set][0], bytes);
  keep_result(set, value);
}

MSL_CALLED void msl_simd_scan(const char* operation, int combination, int element_type, int bytes, int inclusive,
                              void* value) {
  hand_in(value, bytes);
  const uint32_t set = meet(operation, MSL_CALLER, bytes, bytes, [](Simdgroup&, uint32_t) { launch->simd_operations++; });
  with_element_type(element_type, [&](auto example) {
    using T = decltype(example);
    using A = typename Accumulator<T>::type;
    const Simdgroup& s = own_simdgroup();
    A total = combination == 0 ? (A)0 : (A)1;
    for (uint32_t lane = 0; lane < current->lane + (inclusive ? 1 : 0); lane++)
      if (s.present[set] >> lane & 1) total = combine(combination, total, slot_value<T>(s, set, lane));
    const T result = (T)total;
    memcpy(value, &result, sizeof result);
  });
  keep_result(set, value);
}

MSL_CALLED void msl_simd_exchange(const char* operation, int bytes, void* value, unsigned source_lane) {
  hand_in(value, bytes);
  const uint32_t set = meet(operation, MSL_CALLER, bytes, bytes, [](Simdgroup&, uint32_t) { launch->simd_operations++; });
  const Simdgroup& s = own_simdgroup();
  if (source_lane >= kSimdWidth || !(s.present[set] >> source_lane & 1)) {
    if (!launch->checks) return;
    Fault fault = {.kind = "absent lane", .object = operation, .code_address = (uint64_t)MSL_CALLER};
    snprintf(fault.detail, sizeof fault.detail, "%u", source_lane);
    raise_fault(fault);
  }
  copy_value(value, s.slots[set][source_lane], bytes);
  keep_result(set, value, source_lane);
}

MSL_CALLED uint64_t msl_simd_ballot(const char* operation, int predicate) {
  hand_in(&predicate, sizeof predicate);
  const uint32_t set = meet(operation, MSL_CALLER, sizeof predicate, sizeof(uint32_t), [](Simdgroup& s, uint32_t set) {
    launch->simd_operations++;
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < kSimdWidth; lane++)
      if ((s.present[set] >> lane & 1) && *(const int*)s.slots[set][lane]) votes |= 1u << lane;
    memcpy(s.results[set][0], &votes, sizeof votes);
  });
  uint32_t votes;
  memcpy(&votes, own_simdgroup().results[set][0], sizeof votes);
  keep_result(set, &votes);
  return votes;
}

// Takes this lane's two elements of a, b and c, and writes its two elements of a * b + c to the front.
MSL_CALLED void msl_simdgroup_multiply_accumulate(float* a_b_c) {
  hand_in(a_b_c, 6 * sizeof(float));
  const void* site = MSL_CALLER;
  const uint32_t inputs = 6 * sizeof(float), results = 2 * sizeof(float);
  const uint32_t set = meet("simdgroup_multiply_accumulate", site, inputs, results, [=](Simdgroup& s, uint32_t set) {
    if (launch->checks && s.present[set] != ~0u)
      raise_fault({.kind = "partial simdgroup", .object = "simdgroup_multiply_accumulate",
                   .code_address = (uint64_t)site});
    launch->matrix_multiplications++;
    multiply_accumulate(s, set);
  });
  memcpy(a_b_c, own_simdgroup().results[set][current->lane], results);
  keep_result(set, a_b_c);
}
