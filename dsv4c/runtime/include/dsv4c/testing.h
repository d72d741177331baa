#ifndef DSV4C_TESTING_H
#define DSV4C_TESTING_H

/* For the tests of dsv4c only; not installed, and free to change. */

#include <stdint.h>

#if defined(_WIN32)
#define DSV4C_TESTING_API
#else
#define DSV4C_TESTING_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* An argument of a kernel, as in a plan: `kind` and `dtype` are codes of the engine file. */
typedef struct dsv4c_testing_arg {
  uint32_t kind;
  uint32_t dtype;
  uint32_t ndim;
  uint32_t reserved;
  int64_t integer;
  double real;
  void* data;
  int64_t size[4];
  int64_t stride[4]; /* elements */
} dsv4c_testing_arg;

/* Runs one CPU kernel: the arguments of its operator in order, then its outputs. Returns 0, or 1 for an unknown name,
   or 2 when it threw. */
DSV4C_TESTING_API int dsv4c_testing_run_kernel(const char* name, const dsv4c_testing_arg* args, uint32_t count,
                                               uint32_t threads);

/* The variants of the inner loops that this processor runs: the name of number `index`, best first; null behind the
   last. */
DSV4C_TESTING_API const char* dsv4c_testing_simd_name(uint32_t index);

/* Makes every kernel of the process use the variant of that name; null for the best. Returns 0, or 1 if there is no
   such variant. */
DSV4C_TESTING_API int dsv4c_testing_use_simd(const char* name);

/* Returns 0 if `values` are a topology table of so many experts, groups and streaming multiprocessors, else 1. */
DSV4C_TESTING_API int dsv4c_testing_topology(const int32_t* values, uint64_t count, uint64_t experts, uint64_t groups,
                                             uint64_t sm_count);

/* Of the last failed call of this thread. */
DSV4C_TESTING_API const char* dsv4c_testing_error(void);

#ifdef __cplusplus
}
#endif

#endif
