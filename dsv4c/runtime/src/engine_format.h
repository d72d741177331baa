#pragma once

#include <cstdint>

// The records of the engine file, as dsv4c/engine/format.py defines them: same names, same fields, little endian.
namespace dsv4c::format {

constexpr char kMagic[8] = {'D', 'S', 'V', '4', 'C', 'E', 'N', 'G'};
constexpr uint32_t kReadableVersions[] = {1};
constexpr uint32_t kPlanVersion = 1;
constexpr uint64_t kSectionAlign = 4096;
constexpr uint32_t kNoIndex = 0xFFFFFFFF;
// A stride that depends on a symbolic size: dense over the dimensions after it. Only inputs and outputs have it.
constexpr int64_t kDense = -1;

enum SectionType : uint32_t {
  kManifest = 1,
  kPlan = 2,
  kKernels = 3,
  kTokenizer = 4,
  kGoldens = 5,
  kChunks = 6,
  kWeights = 7,
  kSectionTypeEnd = 8,
};

enum SectionFlag : uint32_t { kExternal = 1 };

enum class Space : uint32_t { ARENA = 1, WEIGHT = 2, STATE = 3, INPUT = 4, OUTPUT = 5 };

enum class Dim : uint8_t { FIXED = 0, TOKENS = 1, LOGITS = 2, SLOTS = 3, BLOCKS = 4, TABLE = 5 };
constexpr int kDimCount = 6;

enum class Input : uint32_t {
  TOKEN_IDS = 0,
  SLOTS = 1,
  POSITIONS = 2,
  BLOCK_TABLE = 3,
  LOGITS_ROWS = 4,
  TEMPERATURE = 5,
  TOP_K = 6,
  TOP_P = 7,
  SEED = 8,
  MASK = 9,
};
constexpr int kInputCount = 10;

enum class Output : uint32_t { LOGITS = 0, SAMPLED = 1 };
constexpr int kOutputCount = 2;

enum class BucketKind : uint32_t { DECODE = 1, MIXED = 2 };
enum class StateKind : uint32_t { SLOT = 1, BLOCK = 2, ROUTING_COUNTS = 3 };
enum LaunchFlag : uint32_t { kHead = 1, kSample = 2, kStage = 4, kCooperative = 8, kProgrammatic = 16 };

struct Header {
  char magic[8];
  uint32_t format_version;
  uint32_t section_count;
  uint64_t file_size;
  char arch[16];
  uint32_t world_size;
  uint32_t rank;
  uint8_t table_digest[16];
};
static_assert(sizeof(Header) == 64);

struct Section {
  uint32_t type;
  uint32_t flags;
  uint64_t offset;
  uint64_t size;
  uint64_t reserved;
  uint8_t sha256[32];
};
static_assert(sizeof(Section) == 64);

struct ChunkHeader {
  uint32_t world_size;
  uint32_t rank;
  uint64_t chunk_bytes;
  uint64_t chunk_count;
  uint64_t total_bytes;
  char external_name[64];
  uint8_t reserved[32];
};
static_assert(sizeof(ChunkHeader) == 128);

struct PlanHeader {
  uint32_t plan_version;
  uint32_t world_size;
  uint32_t rank;
  uint32_t sm_count;
  uint32_t vocab_size;
  uint32_t max_context;
  uint32_t block_tokens;
  uint32_t rollback_rows;
  uint32_t hidden_size;
  uint32_t layer_count;
  uint64_t bos_token_id;
  uint64_t weight_bytes;
  uint64_t entry_points;
  uint64_t entry_point_count;
  uint64_t buckets;
  uint64_t bucket_count;
  uint64_t launches;
  uint64_t launch_count;
  uint64_t args;
  uint64_t arg_count;
  uint64_t tensors;
  uint64_t tensor_count;
  uint64_t states;
  uint64_t state_count;
  uint64_t kernels;
  uint64_t kernel_count;
  uint64_t eos_ids;
  uint64_t eos_count;
  uint64_t strings;
  uint64_t strings_bytes;
};
static_assert(sizeof(PlanHeader) == 200);

struct EntryPoint {
  uint32_t name;
  uint32_t first_bucket;
  uint32_t bucket_count;
  uint32_t flags;
};
static_assert(sizeof(EntryPoint) == 16);

struct Bucket {
  uint32_t kind;
  uint32_t tokens;
  uint32_t first_launch;
  uint32_t launch_count;
  uint64_t arena_bytes;
  uint32_t sm_count;
  uint32_t reserved;
};
static_assert(sizeof(Bucket) == 32);

struct Launch {
  uint32_t kernel;
  uint32_t name;
  uint32_t layer;
  uint32_t flags;
  uint32_t first_arg;
  uint32_t arg_count;
  uint32_t output_count;
  uint32_t cluster;
  uint64_t bytes_moved;
  uint64_t flops;
  uint32_t grid_x;
  uint32_t grid_y;
  uint32_t grid_z;
  uint32_t block_x;
  uint32_t block_y;
  uint32_t block_z;
  uint32_t shared_bytes;
  uint32_t reserved;
};
static_assert(sizeof(Launch) == 80);

struct Arg {
  uint32_t kind;
  uint32_t reserved;
  int64_t value;
};
static_assert(sizeof(Arg) == 16);

struct Tensor {
  uint32_t space;
  uint32_t dtype;
  uint32_t ndim;
  uint32_t index;
  uint64_t offset;
  uint8_t dim[4];
  uint8_t padding[4];
  uint64_t size[4];
  int64_t stride[4];
};
static_assert(sizeof(Tensor) == 96);

struct State {
  uint32_t name;
  uint32_t kind;
  uint32_t dtype;
  uint32_t layer;
  uint32_t rows;
  uint32_t ratio;
  uint64_t row_bytes;
};
static_assert(sizeof(State) == 32);

struct Kernel {
  uint32_t name;
  uint32_t entry;
  uint64_t image_offset;
  uint64_t image_bytes;
};
static_assert(sizeof(Kernel) == 24);

}  // namespace dsv4c::format
