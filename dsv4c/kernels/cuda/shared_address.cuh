// The address of shared memory as PTX instructions take it.
#pragma once

#include "dtype.cuh"

#ifndef DSV4C_EMULATE
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(pointer));
  return address;
}
#endif
