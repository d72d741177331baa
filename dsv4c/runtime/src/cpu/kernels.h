#pragma once

#include "kernel.h"
#include "thread_pool.h"

// One function per `dsv4::` operator. Arguments are those of its schema in order, then its outputs; the reference
// bodies in dsv4c/graph say what each computes.
namespace dsv4c::cpu {

void add(const KernelArgs& args, ThreadPool& pool);
void attention(const KernelArgs& args, ThreadPool& pool);
void commit_ring(const KernelArgs& args, ThreadPool& pool);
void compress(const KernelArgs& args, ThreadPool& pool);
void count_routing(const KernelArgs& args, ThreadPool& pool);
void embedding(const KernelArgs& args, ThreadPool& pool);
void fp4_round(const KernelArgs& args, ThreadPool& pool);
void fp8_round(const KernelArgs& args, ThreadPool& pool);
void gather_rows(const KernelArgs& args, ThreadPool& pool);
void grouped_linear(const KernelArgs& args, ThreadPool& pool);
void hadamard(const KernelArgs& args, ThreadPool& pool);
void linear(const KernelArgs& args, ThreadPool& pool);
void mhc_combine(const KernelArgs& args, ThreadPool& pool);
void mhc_head(const KernelArgs& args, ThreadPool& pool);
void mhc_mix(const KernelArgs& args, ThreadPool& pool);
void moe_ffn(const KernelArgs& args, ThreadPool& pool);
void rms_norm(const KernelArgs& args, ThreadPool& pool);
void rope(const KernelArgs& args, ThreadPool& pool);
void route_hash(const KernelArgs& args, ThreadPool& pool);
void route_topk(const KernelArgs& args, ThreadPool& pool);
void sample(const KernelArgs& args, ThreadPool& pool);
void select_entries(const KernelArgs& args, ThreadPool& pool);
void swiglu(const KernelArgs& args, ThreadPool& pool);

}  // namespace dsv4c::cpu
