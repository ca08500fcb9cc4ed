// Functions that the kernel's code calls: those that clang's thread sanitizer pass puts before every load and store
// (its own runtime is not linked), the handlers of the undefined behaviour sanitizer, and atomics.
#include <cstdio>
#include <cstring>

#include "runtime.h"

using namespace msl;

MSL_COLD static void raise_misaligned(uint64_t address, uint32_t bytes, AccessKind kind, const void* site) {
  Fault fault = {.kind = "misaligned", .code_address = (uint64_t)site, .byte_offset = (int64_t)(address % bytes)};
  fault.access_bytes = bytes;
  fault.is_write = writes(kind);
  raise_fault(fault);
}

// Clang calls the plain hooks for accesses whose type requires alignment to its size.
static inline void check_aligned_access(void* p, uint32_t bytes, AccessKind kind, const void* site) {
  if ((uint64_t)p % bytes) raise_misaligned((uint64_t)p, bytes, kind, site);
  check_access(p, bytes, kind, site);
}

#define MSL_ACCESS_HOOKS(bytes)                                                                         \
  MSL_CALLED void __tsan_read##bytes(void* p) { check_aligned_access(p, bytes, kRead, MSL_CALLER); }    \
  MSL_CALLED void __tsan_write##bytes(void* p) { check_aligned_access(p, bytes, kWrite, MSL_CALLER); }  \
  MSL_CALLED void __tsan_unaligned_read##bytes(void* p) { check_access(p, bytes, kRead, MSL_CALLER); }  \
  MSL_CALLED void __tsan_unaligned_write##bytes(void* p) { check_access(p, bytes, kWrite, MSL_CALLER); }
MSL_ACCESS_HOOKS(1)
MSL_ACCESS_HOOKS(2)
MSL_ACCESS_HOOKS(4)
MSL_ACCESS_HOOKS(8)
MSL_ACCESS_HOOKS(16)

MSL_CALLED void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes) check_access((void*)from, bytes, kRead, MSL_CALLER);
  if (bytes) check_access(to, bytes, kWrite, MSL_CALLER);
  return memcpy(to, from, bytes);
}
MSL_CALLED void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  if (bytes) check_access((void*)from, bytes, kRead, MSL_CALLER);
  if (bytes) check_access(to, bytes, kWrite, MSL_CALLER);
  return memmove(to, from, bytes);
}
MSL_CALLED void* __tsan_memset(void* to, int value, size_t bytes) {
  if (bytes) check_access(to, bytes, kWrite, MSL_CALLER);
  return memset(to, value, bytes);
}
MSL_CALLED void __tsan_init() {}
MSL_CALLED void __tsan_func_entry(void*) {}
MSL_CALLED void __tsan_func_exit() {}

// ---- undefined behaviour: every handler's first argument starts with the place in the source ----

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind;  // 0: integer
  uint16_t info;  // bit 0: signed; the rest: log2 of the width in bits
  char name[1];
};
struct OutOfBoundsData {
  SourceLocation at;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

static Fault fault_at(const char* kind, const SourceLocation& at) {
  Fault fault = {.kind = kind};
  snprintf(fault.file, sizeof fault.file, "%s", at.file ? at.file : "");
  fault.line = at.line;
  fault.column = at.column;
  return fault;
}

MSL_CALLED void __ubsan_handle_out_of_bounds(OutOfBoundsData* data, uint64_t index) {
  Fault fault = fault_at("array out of bounds", data->at);
  const int bits = 1 << (data->index->info >> 1);
  int64_t value = (int64_t)index;
  if (bits < 64) value = data->index->info & 1 ? (int64_t)(index << (64 - bits)) >> (64 - bits) : index & ((1ull << bits) - 1);
  fault.byte_offset = value;
  snprintf(fault.detail, sizeof fault.detail, "%s", data->array->name);
  raise_fault(fault);
}

#define MSL_ARITHMETIC_HANDLER(name, description)                       \
  MSL_CALLED void __ubsan_handle_##name(SourceLocation* data) {         \
    Fault fault = fault_at("arithmetic", *data);                        \
    snprintf(fault.detail, sizeof fault.detail, "%s", description);     \
    raise_fault(fault);                                                 \
  }
MSL_ARITHMETIC_HANDLER(divrem_overflow, "integer division by zero, or of the lowest value by -1")
MSL_ARITHMETIC_HANDLER(add_overflow, "signed integer overflow in an addition")
MSL_ARITHMETIC_HANDLER(sub_overflow, "signed integer overflow in a subtraction")
MSL_ARITHMETIC_HANDLER(mul_overflow, "signed integer overflow in a multiplication")
MSL_ARITHMETIC_HANDLER(negate_overflow, "signed integer overflow in a negation")
MSL_ARITHMETIC_HANDLER(float_cast_overflow, "a float outside the range of the integer type it is converted to")
MSL_ARITHMETIC_HANDLER(missing_return, "the end of a function that should return a value was reached")
MSL_ARITHMETIC_HANDLER(builtin_unreachable, "code marked unreachable was reached")

// ---- atomics: one operating system thread runs the kernel, so plain operations suffice ----

// Atomic integer arithmetic wraps around.
static float wrapping_add(float a, float b) { return a + b; }
static uint32_t wrapping_add(uint32_t a, uint32_t b) { return a + b; }
static int32_t wrapping_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
static float negated(float a) { return -a; }
static uint32_t negated(uint32_t a) { return 0u - a; }
static int32_t negated(int32_t a) { return (int32_t)(0u - (uint32_t)a); }

// Codes as in include/atomic.h.
template <class T>
static T run_atomic(void* address, int operation, T operand, const void* site) {
  const AccessKind kind = operation == 0 ? kAtomicLoad : operation == 1 ? kAtomicStore : kAtomicUpdate;
  if (launch->checks) check_access(address, sizeof(T), kind, site);
  T* object = (T*)address;
  const T old = *object;
  switch (operation) {
    case 0: break;
    case 1:
    case 9: *object = operand; break;
    case 2: *object = wrapping_add(old, operand); break;
    case 3: *object = wrapping_add(old, negated(operand)); break;
    case 4: *object = old > operand ? old : operand; break;
    case 5: *object = old < operand ? old : operand; break;
  }
  if constexpr (!__is_same(T, float)) switch (operation) {
      case 6: *object = old & operand; break;
      case 7: *object = old | operand; break;
      case 8: *object = old ^ operand; break;
    }
  return old;
}

MSL_CALLED uint32_t msl_atomic_uint(void* address, int operation, uint32_t operand) {
  return run_atomic(address, operation, operand, MSL_CALLER);
}
MSL_CALLED int32_t msl_atomic_int(void* address, int operation, int32_t operand) {
  return run_atomic(address, operation, operand, MSL_CALLER);
}
MSL_CALLED float msl_atomic_float(void* address, int operation, float operand) {
  return run_atomic(address, operation, operand, MSL_CALLER);
}
MSL_CALLED int msl_atomic_compare_exchange(void* address, uint32_t* expected, uint32_t desired) {
  if (launch->checks) check_access(address, sizeof desired, kAtomicUpdate, MSL_CALLER);
  uint32_t* object = (uint32_t*)address;
  if (*object == *expected) {
    *object = desired;
    return 1;
  }
  *expected = *object;
  return 0;
}
