// Counters in global memory, by which blocks wait for one another: a look at one that has not changed lets others run.
#pragma once

#include "block.h"

namespace emulate {

extern unsigned long long changes;  // of counters, and threads that have returned: what others may wait for

}  // namespace emulate
