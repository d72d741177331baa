// Copies from global to shared memory that run beside their thread, and the barriers in shared memory that they arrive
// at. Blocks in order 0 make a copy as late as they may, when nothing else of the block can run; in order 1 at once.
#pragma once

#include "block.h"

// The linker's names for the bounds of the section that static shared memory is in; absent where a kernel has none.
extern "C" unsigned char __start_dsv4c_shared[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_dsv4c_shared[] __attribute__((weak, visibility("hidden")));

namespace emulate {

// Bytes from the beginning of dynamic shared memory.
inline size_t shared_byte(const void* place) { return static_cast<const unsigned char*>(place) - dynamic_shared; }

// What a landing brings comes now.
void land(Landing& landing);
// At the end of a block: nothing is under way, no bytes are missing.
void check_barriers();

}  // namespace emulate
