// What every kernel knows of the step: its last parameter points to a StepHeader in device memory, written before the
// launch. Mirrored by runtime/src/cuda/step_block.h and tests/kernels.
#pragma once

struct StepHeader {
  int tokens;         // T: rows of this step
  int logits_rows;    // R: rows that want logits
  int slots;          // S: slots of the session
  int blocks;         // B: state blocks of the session
  int table_width;    // M: blocks of one slot (columns of the block table)
  int has_mask;       // whether the sampling mask is given
  unsigned arrivals;  // zero when a step begins; a launch that counts its blocks in it leaves it zero
  int reserved;
  // A run is the rows of one slot, consecutive positions in the order of the step.
  const int* run_first;   // [T] position of the first row of this row's run
  const int* run_begin;   // [T] where the rows of this row's run begin in run_rows
  const int* run_length;  // [T] rows of this row's run
  const int* run_rows;    // [T] rows of the step, run after run
};
