#pragma once

#include "plan_reader.h"

namespace dsv4c {

// The tables that say which streaming multiprocessor computes which expert, among the weights: opening an engine does
// not compare these with their digests, and kernels use what the tables say as indices.
void check_topologies(const Plan& plan, Bytes weights);

}  // namespace dsv4c
