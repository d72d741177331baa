#pragma once

#include "plan_reader.h"

namespace dsv4c {

// The arguments of a launch are those of its kernel, with shapes that fit one another. `read_plan` has checked each
// record by itself; a kernel given two that contradict each other would read beyond one of them.
void check_arguments(const Plan& plan, size_t launch_index);

// A launch of machine code: arguments that are pointers, a grid that a GPU can have, and calls of one operator that
// belong together.
void check_call(const Plan& plan, size_t launch_index, const format::Bucket& bucket);

}  // namespace dsv4c
