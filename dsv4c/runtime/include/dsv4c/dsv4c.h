/* dsv4c: runs compiled engines of the DeepSeek-V4 family.
 *
 * Calls return a status; on anything but DSV4C_OK, dsv4c_last_error() says what was wrong, for the calling thread.
 * An engine may be used by several threads at once. A session is used by one thread at a time; a second one gets
 * DSV4C_BUSY. Sessions keep their engine alive, so the two may be closed in any order.
 *
 * Option structs begin with struct_size = sizeof(the struct); fields that an older caller does not know are 0.
 */
#ifndef DSV4C_H
#define DSV4C_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DSV4C_API __attribute__((visibility("default")))
#else
#define DSV4C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a call changes its meaning; new calls and new fields at the end of structs leave it. */
#define DSV4C_ABI_VERSION 1u

typedef enum dsv4c_status {
  DSV4C_OK = 0,
  DSV4C_INVALID_ARGUMENT = 1,
  DSV4C_IO = 2,            /* the file cannot be opened, read or mapped */
  DSV4C_FORMAT = 3,        /* not an engine, truncated, or a record that contradicts another */
  DSV4C_VERSION = 4,       /* an engine of a format this runtime does not read */
  DSV4C_ARCH = 5,          /* an engine for another machine */
  DSV4C_DIGEST = 6,        /* bytes that do not match their digest */
  DSV4C_OUT_OF_MEMORY = 7,
  DSV4C_UNSUPPORTED = 8,   /* a kernel or feature that this runtime lacks */
  DSV4C_BUSY = 9,          /* the session is in use by another thread */
  DSV4C_STOPPED = 10,      /* a callback asked to stop */
  DSV4C_INTERNAL = 11,     /* a bug in dsv4c */
  DSV4C_DEVICE = 12        /* an error that the GPU's driver reported */
} dsv4c_status;

typedef struct dsv4c_engine dsv4c_engine;
typedef struct dsv4c_session dsv4c_session;

DSV4C_API uint32_t dsv4c_abi_version(void);
DSV4C_API const char* dsv4c_version(void);
DSV4C_API const char* dsv4c_status_name(dsv4c_status status);
/* Valid until the next failing call of this thread; "" before the first. */
DSV4C_API const char* dsv4c_last_error(void);

/* ---- engine ---- */

typedef struct dsv4c_engine_options {
  uint32_t struct_size;
  uint32_t threads; /* 0: one per processor */
  uint32_t device;  /* index of the GPU; engines for the cpu ignore it */
} dsv4c_engine_options;

#define DSV4C_NO_TOKEN (-1)

typedef struct dsv4c_engine_info {
  uint32_t struct_size;
  uint32_t format_version;
  char arch[20]; /* zero-terminated */
  uint32_t world_size;
  uint32_t rank;
  uint32_t vocab_size;
  uint32_t max_context; /* positions */
  uint32_t layer_count;
  uint32_t hidden_size;
  uint32_t block_tokens;
  uint32_t rollback_rows; /* how far below its highest position a slot can be truncated */
  int32_t bos_token_id;   /* DSV4C_NO_TOKEN when the model has none */
  uint32_t eos_count;
  uint32_t threads;
  const uint32_t* eos_token_ids; /* valid while the engine is open */
  uint64_t weight_bytes;
  char device[100];  /* "GPU 0 (NVIDIA H200)", zero-terminated; "" on the cpu */
  uint32_t sm_count; /* streaming multiprocessors of the GPU; 0 on the cpu */
  double weight_seconds; /* that opening took to bring the weights to the GPU; 0 on the cpu, which maps them */
  uint32_t counted_layers;  /* whose routing dsv4c_session_routing_counts tells; 0: the engine was built without */
  uint32_t counted_experts; /* of each of them; 0 without */
} dsv4c_engine_info;

enum {
  DSV4C_SECTION_MANIFEST = 1,
  DSV4C_SECTION_PLAN = 2,
  DSV4C_SECTION_KERNELS = 3,
  DSV4C_SECTION_TOKENIZER = 4,
  DSV4C_SECTION_GOLDENS = 5,
  DSV4C_SECTION_CHUNKS = 6,
  DSV4C_SECTION_WEIGHTS = 7
};

/* Nonzero stops the verification with DSV4C_STOPPED. */
typedef int (*dsv4c_progress_fn)(void* user, uint64_t done_bytes, uint64_t total_bytes);

/* Checks everything in the file but the weights' digests; writes nothing to disk. An engine for a GPU needs NVIDIA's
 * driver and copies its weights there. `options` may be NULL. */
DSV4C_API dsv4c_status dsv4c_engine_open(const char* path, const dsv4c_engine_options* options, dsv4c_engine** engine);
DSV4C_API void dsv4c_engine_close(dsv4c_engine* engine);
DSV4C_API dsv4c_status dsv4c_engine_get_info(const dsv4c_engine* engine, dsv4c_engine_info* info);
/* The bytes of a section, valid while the engine is open; NULL and 0 where the engine has none. */
DSV4C_API dsv4c_status dsv4c_engine_section(const dsv4c_engine* engine, uint32_t type, const void** data,
                                            uint64_t* size);
/* Reads every weight and compares it with the chunk digests. `progress` may be NULL. */
DSV4C_API dsv4c_status dsv4c_engine_verify_weights(const dsv4c_engine* engine, dsv4c_progress_fn progress, void* user);

/* ---- session ---- */

enum {
  /* Debugging: fresh state and scratch memory hold NaN bytes (0xFF) instead of zeros. */
  DSV4C_SESSION_POISON = 1,
  /* Debugging: launch every kernel by itself where a GPU would replay a CUDA graph. */
  DSV4C_SESSION_NO_GRAPHS = 2
};

typedef struct dsv4c_session_options {
  uint32_t struct_size;
  uint32_t slots;   /* sequences; 0: 1 */
  uint32_t context; /* positions a slot can hold; 0: what the engine allows */
  uint32_t flags;
} dsv4c_session_options;

#define DSV4C_ALL_ROWS UINT32_MAX

enum {
  /* A traced step reports times and no outputs; on a GPU they are then those of an ordinary step, and the callback is
   * called when all launches have run. */
  DSV4C_STEP_TIMES_ONLY = 1
};

/* Token rows of one step. The rows of a slot are consecutive positions that continue the slot. */
typedef struct dsv4c_step {
  uint32_t struct_size;
  uint32_t row_count;
  const int32_t* token_ids; /* [row_count] */
  const int32_t* slots;     /* [row_count] */
  const int32_t* positions; /* [row_count] */
  const int32_t* logits_rows; /* [logits_count], each once; NULL with DSV4C_ALL_ROWS or 0 */
  uint32_t logits_count;      /* DSV4C_ALL_ROWS: every row */
  uint32_t flags;
} dsv4c_step;

/* One entry per logits row. */
typedef struct dsv4c_sampling {
  uint32_t struct_size;
  uint32_t reserved;
  const float* temperature; /* 0: the largest logit */
  const int32_t* top_k;     /* 0: all */
  const float* top_p;       /* in (0, 1]; 1: all */
  const int64_t* seed;
  const int32_t* mask; /* NULL, or [rows, ceil(vocab_size / 32)]: lowest bit first, set = allowed */
} dsv4c_sampling;

typedef struct dsv4c_trace_tensor {
  const void* data; /* in the host's memory */
  uint32_t dtype; /* code of the engine file: 1 float32, 2 bfloat16, ... */
  uint32_t ndim;
  int64_t size[4];
  int64_t stride[4]; /* elements */
} dsv4c_trace_tensor;

typedef struct dsv4c_trace_event {
  uint32_t struct_size;
  uint32_t launch;    /* index in its bucket */
  const char* kernel;
  const char* node;   /* name in the graph */
  uint32_t layer;     /* UINT32_MAX outside the layers */
  uint32_t first_row; /* of the step; not 0 where a long step runs in pieces */
  uint32_t row_count;
  uint32_t output_count;
  const dsv4c_trace_tensor* outputs; /* valid during the call */
  uint64_t bytes_moved; /* as planned for the whole bucket */
  uint64_t flops;
  double seconds; /* of this launch */
} dsv4c_trace_event;

/* Nonzero stops the step with DSV4C_STOPPED. */
typedef int (*dsv4c_trace_fn)(void* user, const dsv4c_trace_event* event);

/* `options` may be NULL. */
DSV4C_API dsv4c_status dsv4c_session_create(dsv4c_engine* engine, const dsv4c_session_options* options,
                                            dsv4c_session** session);
DSV4C_API void dsv4c_session_destroy(dsv4c_session* session);

/* A refused step (DSV4C_INVALID_ARGUMENT) changes nothing. A step that fails or is stopped half way leaves its slots at
 * their old length, or resets those whose older rows it has overwritten; the message says which.
 * `logits` has room for `logits_size` floats: rows * vocab_size. */
DSV4C_API dsv4c_status dsv4c_session_step(dsv4c_session* session, const dsv4c_step* step, float* logits,
                                          uint64_t logits_size);
/* ids: one per logits row; -1 where the mask allows no token. */
DSV4C_API dsv4c_status dsv4c_session_sample(dsv4c_session* session, const dsv4c_step* step,
                                            const dsv4c_sampling* sampling, int32_t* ids);
/* A step that calls `callback` after every launch, on a GPU after the last one of every operator. */
DSV4C_API dsv4c_status dsv4c_session_trace(dsv4c_session* session, const dsv4c_step* step, dsv4c_trace_fn callback,
                                           void* user);

DSV4C_API dsv4c_status dsv4c_session_length(dsv4c_session* session, uint32_t slot, uint32_t* length);
DSV4C_API dsv4c_status dsv4c_session_reset(dsv4c_session* session, uint32_t slot);
/* Forget positions from `position` on. It may be 0, or down to rollback_rows below the highest position reached. */
DSV4C_API dsv4c_status dsv4c_session_truncate(dsv4c_session* session, uint32_t slot, uint32_t position);
DSV4C_API dsv4c_status dsv4c_session_fork(dsv4c_session* session, uint32_t source, uint32_t destination);
DSV4C_API dsv4c_status dsv4c_session_save_size(dsv4c_session* session, uint32_t slot, uint64_t* size);
/* `size` is that of dsv4c_session_save_size. */
DSV4C_API dsv4c_status dsv4c_session_save(dsv4c_session* session, uint32_t slot, void* data, uint64_t size);
/* Takes only a state of the same engine; a refused one changes nothing. */
DSV4C_API dsv4c_status dsv4c_session_restore(dsv4c_session* session, uint32_t slot, const void* data, uint64_t size);

/* How often each expert was chosen in this session, by the rows of all its slots, since it was created or the counts
 * were reset: once for every choice of every row that a step has run. Resetting, cutting back, copying or restoring a
 * slot does not change the counts; a step that failed or was stopped may have been counted in part.
 * `counts` [counted_layers, counted_experts] of dsv4c_engine_info has room for `counts_size` numbers; `layers`, which
 * may be NULL, gets the numbers of the layers, ascending. Engines count only if built with `counts = true` in the
 * recipe's table [experts]; others refuse both calls with DSV4C_INVALID_ARGUMENT. */
DSV4C_API dsv4c_status dsv4c_session_routing_counts(dsv4c_session* session, uint32_t* layers, uint64_t* counts,
                                                    uint64_t counts_size);
DSV4C_API dsv4c_status dsv4c_session_reset_routing_counts(dsv4c_session* session);

#ifdef __cplusplus
}
#endif

#endif
