#pragma once

#include "plan_reader.h"

namespace dsv4c {

// Facts of the record alone: codes, dimensions, index, alignment. Throws with "tensor N ...".
void check_tensor(const Plan& plan, size_t index);

// The bytes that `tensor` may touch lie in its space when a launch of `bucket` uses it.
void check_extent(const Plan& plan, size_t index, const format::Bucket& bucket);

}  // namespace dsv4c
