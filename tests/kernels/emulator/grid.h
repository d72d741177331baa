// Runs a grid: one block after the other, each as far as it comes by itself. One that looks at a counter that another
// block is to change stays alive, with its own shared memory, and goes on after the others have run; so blocks that
// wait for one another all live at once, and the others never do.
#pragma once

#include "counters.h"
#include "warpgroup.h"

namespace emulate {

// Runs a grid; the error's text, or null. `order` 1 runs blocks, warps and lanes last to first: a kernel whose result
// depends on that lacks a barrier.
const char* launch(const unsigned grid[3], unsigned block, size_t shared_bytes, int order);

}  // namespace emulate
