// The address of shared memory as PTX instructions take it, and loads from such addresses.
#pragma once

#include "dtype.cuh"

#ifdef DSV4C_EMULATE
typedef const u8* SharedAddress;
inline SharedAddress fixed_address(const void* pointer) { return (const u8*)pointer; }
inline SharedAddress fresh_address(SharedAddress base, int offset) { return base + offset; }
inline uint4 load_shared_16(SharedAddress address) { return *(const uint4*)address; }
inline uint2 load_shared_8(SharedAddress address) { return *(const uint2*)address; }
#else
typedef u32 SharedAddress;
__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// An address that the compiler keeps in a register instead of computing it again where it is used.
__device__ __forceinline__ SharedAddress fixed_address(const void* pointer) {
  u32 address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return address;
}
// The opposite: computed where it is used, instead of kept in a register through a loop.
__device__ __forceinline__ SharedAddress fresh_address(SharedAddress base, int offset) {
  u32 address = base + offset;
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ uint4 load_shared_16(SharedAddress address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ uint2 load_shared_8(SharedAddress address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}
#endif
