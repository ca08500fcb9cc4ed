// Helpers with which the generated entry point calls a kernel: arguments are addresses, converted to the pointers or
// references of the kernel's signature.
#pragma once
#include "base.h"
#include "thread_attributes.h"
#include "vectors.h"

struct msl_argument {
  size_t address;
  template <class T>
  operator __global T*() const {
    return (__global T*)address;
  }
  template <class T>
  operator __constant T*() const {
    return (__constant T*)address;
  }
  template <class T>
  operator __constant T&() const {
    return *(__constant T*)address;
  }
};

MSL_SHIM uint3 msl_uint3(__global const unsigned* xyz) {
  uint3 v;
  v[0] = xyz[0];
  v[1] = xyz[1];
  v[2] = xyz[2];
  return v;
}
