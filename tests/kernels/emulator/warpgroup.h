// Products of a warpgroup. All 128 threads meet in one; its sums reach the registers when a thread waits for them, and
// until then those hold NaNs. B is read as late as it may (order 0: at the first wait) or at once (order 1).
#pragma once

#include "block.h"

namespace emulate {

// At the end of a block.
void check_products();

}  // namespace emulate
