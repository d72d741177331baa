#include "engine_file.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "error.h"
#include "thread_pool.h"

static_assert(std::endian::native == std::endian::little, "the engine file is little endian and read as it is");

namespace dsv4c {
namespace {

using namespace format;

constexpr uint32_t kMaxSections = 64;
// Opening hashes every section but the weights, and reads the padding: a damaged size must not make that take hours.
constexpr uint64_t kMaxSectionBytes = uint64_t{1} << 30;

const char* const kSectionNames[kSectionTypeEnd] = {"",        "MANIFEST", "PLAN",    "KERNELS", "TOKENIZER",
                                                    "GOLDENS", "CHUNKS",   "WEIGHTS"};

// Fixed-size text, zero-padded.
std::string text(const char* data, size_t capacity) { return std::string(data, strnlen(data, capacity)); }

bool is_padding(const std::byte* data, const std::byte* end) {
  return std::all_of(data, end, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

EngineFile::EngineFile(const std::string& path) : file_(path, "engine") {
  check_header();
  check_table();
  check_gaps();
  check_section_digests();
  open_weights(path);
}

std::string EngineFile::arch() const { return text(header_.arch, sizeof header_.arch); }

uint64_t EngineFile::weights_offset() const {
  return weights_are_external_ ? 0 : static_cast<uint64_t>(sections_[kWeights].data - file_.data());
}

void EngineFile::check_header() {
  if (file_.size() < sizeof kMagic || std::memcmp(file_.data(), kMagic, sizeof kMagic) != 0)
    fail(DSV4C_FORMAT, "not an engine file: it does not begin with %.8s", kMagic);
  if (file_.size() < sizeof header_)
    fail(DSV4C_FORMAT, "engine is %" PRIu64 " bytes, shorter than its 64-byte header", file_.size());
  std::memcpy(&header_, file_.data(), sizeof header_);
  // Before anything else that the header says: another version may lay the rest out differently.
  if (std::find(std::begin(kReadableVersions), std::end(kReadableVersions), header_.format_version) ==
      std::end(kReadableVersions)) {
    std::string readable;
    for (uint32_t version : kReadableVersions) readable += (readable.empty() ? "" : ", ") + std::to_string(version);
    fail(DSV4C_VERSION, "engine has format version %u; this runtime reads %s", header_.format_version,
         readable.c_str());
  }
  if (header_.file_size != file_.size())
    fail(DSV4C_FORMAT, "engine is %" PRIu64 " bytes, its header says %" PRIu64, file_.size(), header_.file_size);
  if (header_.section_count > kMaxSections)
    fail(DSV4C_FORMAT, "engine has %u sections, more than the %u possible", header_.section_count, kMaxSections);
  const uint64_t table_bytes = uint64_t{header_.section_count} * sizeof(Section);
  if (table_bytes > file_.size() - sizeof header_)
    fail(DSV4C_FORMAT, "section table of %u entries does not fit in the engine", header_.section_count);
  Sha256 hash;
  hash.update(file_.data(), offsetof(Header, table_digest));
  hash.update(file_.data() + sizeof header_, table_bytes);
  if (std::memcmp(hash.finish().data(), header_.table_digest, sizeof header_.table_digest) != 0)
    fail(DSV4C_DIGEST, "header and section table do not match their digest: the engine is damaged");
  if (arch() != "cpu" && !arch().starts_with("sm_"))
    fail(DSV4C_ARCH, "engine is for %s, this runtime runs cpu and GPUs of NVIDIA (sm_...)", arch().c_str());
  if (header_.world_size == 0 || header_.rank >= header_.world_size)
    fail(DSV4C_FORMAT, "engine says rank %u of %u", header_.rank, header_.world_size);
  if (header_.world_size != 1)
    fail(DSV4C_UNSUPPORTED, "engine is one of %u ranks; this runtime runs engines of one rank", header_.world_size);
}

void EngineFile::check_table() {
  for (uint32_t i = 0; i < header_.section_count; ++i) {
    Section entry;
    std::memcpy(&entry, file_.data() + sizeof header_ + i * sizeof entry, sizeof entry);
    if (entry.type == 0 || entry.type >= kSectionTypeEnd)
      fail(DSV4C_FORMAT, "section %u has unknown type %u", i, entry.type);
    const char* name = kSectionNames[entry.type];
    if (present_[entry.type]) fail(DSV4C_FORMAT, "engine has two %s sections", name);
    present_[entry.type] = true;
    if (entry.reserved != 0) fail(DSV4C_FORMAT, "reserved field of section %s is not zero", name);
    std::memcpy(digests_[entry.type].data(), entry.sha256, sizeof entry.sha256);
    if (entry.flags == kExternal && entry.type == kWeights) {
      if (entry.offset != 0) fail(DSV4C_FORMAT, "external WEIGHTS have offset %" PRIu64 ", expected 0", entry.offset);
      weights_are_external_ = true;
      sections_[kWeights].size = entry.size;
      continue;
    }
    if (entry.flags != 0) fail(DSV4C_FORMAT, "section %s has unknown flags %u", name, entry.flags);
    if (entry.offset % kSectionAlign != 0)
      fail(DSV4C_FORMAT, "section %s begins at %" PRIu64 ", not on a %" PRIu64 "-byte boundary", name, entry.offset,
           kSectionAlign);
    if (entry.offset > file_.size() || entry.size > file_.size() - entry.offset)
      fail(DSV4C_FORMAT,
           "section %s (offset %" PRIu64 ", %" PRIu64 " bytes) lies outside the engine of %" PRIu64 " bytes", name,
           entry.offset, entry.size, file_.size());
    if (entry.type != kWeights && entry.size > kMaxSectionBytes)
      fail(DSV4C_FORMAT, "section %s is %" PRIu64 " bytes, more than the %" PRIu64 " possible", name, entry.size,
           kMaxSectionBytes);
    sections_[entry.type] = {file_.data() + entry.offset, entry.size};
  }
  for (uint32_t type : {kManifest, kPlan, kChunks, kWeights})
    if (!present_[type]) fail(DSV4C_FORMAT, "engine has no %s section", kSectionNames[type]);
}

// Sections follow one another without overlap, and nothing but zeros is between them.
void EngineFile::check_gaps() const {
  std::vector<uint32_t> order;
  for (uint32_t type = 1; type < kSectionTypeEnd; ++type)
    if (sections_[type].data) order.push_back(type);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    // An empty section may share its offset with the next one.
    return std::pair(sections_[a].data, sections_[a].size) < std::pair(sections_[b].data, sections_[b].size);
  });
  const std::byte* end = file_.data() + sizeof header_ + header_.section_count * sizeof(Section);
  const char* before = "the section table";
  for (uint32_t type : order) {
    const Bytes& bytes = sections_[type];
    if (bytes.data < end) fail(DSV4C_FORMAT, "section %s overlaps %s", kSectionNames[type], before);
    if (static_cast<uint64_t>(bytes.data - end) >= kSectionAlign)
      fail(DSV4C_FORMAT, "section %s does not follow %s: %td bytes lie between them", kSectionNames[type], before,
           bytes.data - end);
    if (!is_padding(end, bytes.data)) fail(DSV4C_FORMAT, "padding before section %s is not zero", kSectionNames[type]);
    end = bytes.data + bytes.size;
    before = kSectionNames[type];
  }
  const std::byte* file_end = file_.data() + file_.size();
  if (static_cast<uint64_t>(file_end - end) >= kSectionAlign)
    fail(DSV4C_FORMAT, "%td bytes after section %s belong to no section", file_end - end, before);
  if (!is_padding(end, file_end)) fail(DSV4C_FORMAT, "bytes after section %s are not zero", before);
}

void EngineFile::check_section_digests() const {
  for (uint32_t type = 1; type < kSectionTypeEnd; ++type) {
    if (type == kWeights || !present_[type]) continue;
    if (sha256(sections_[type].data, sections_[type].size) != digests_[type])
      fail(DSV4C_DIGEST, "section %s does not match its digest: the engine is damaged", kSectionNames[type]);
  }
  if (digests_[kWeights] != digests_[kChunks])
    fail(DSV4C_DIGEST, "the digest of WEIGHTS is not that of CHUNKS: the weights belong to another engine");
}

void EngineFile::open_weights(const std::string& path) {
  const Bytes chunks = sections_[kChunks];
  ChunkHeader& header = chunk_header_;
  if (chunks.size < sizeof header)
    fail(DSV4C_FORMAT, "section CHUNKS is %" PRIu64 " bytes, shorter than its header", chunks.size);
  std::memcpy(&header, chunks.data, sizeof header);
  if (header.world_size != header_.world_size || header.rank != header_.rank)
    fail(DSV4C_FORMAT, "CHUNKS are of rank %u of %u, the engine is rank %u of %u", header.rank, header.world_size,
         header_.rank, header_.world_size);
  if (header.total_bytes != sections_[kWeights].size)
    fail(DSV4C_FORMAT, "CHUNKS cover %" PRIu64 " bytes, WEIGHTS have %" PRIu64, header.total_bytes,
         sections_[kWeights].size);
  if (header.chunk_bytes == 0) fail(DSV4C_FORMAT, "CHUNKS have chunks of 0 bytes");
  const uint64_t expected =
      header.total_bytes / header.chunk_bytes + (header.total_bytes % header.chunk_bytes != 0 ? 1 : 0);
  if (header.chunk_count != expected)
    fail(DSV4C_FORMAT, "CHUNKS have %" PRIu64 " chunks, expected %" PRIu64, header.chunk_count, expected);
  const uint64_t digest_bytes = chunks.size - sizeof header;
  if (digest_bytes % sizeof(Digest) != 0 || digest_bytes / sizeof(Digest) != header.chunk_count)
    fail(DSV4C_FORMAT, "section CHUNKS is %" PRIu64 " bytes, which is not %" PRIu64 " digests", chunks.size,
         header.chunk_count);
  const std::string name = text(header.external_name, sizeof header.external_name);
  if (!weights_are_external_) {
    if (name.empty()) return;
    fail(DSV4C_FORMAT, "CHUNKS name the weights file %s, but WEIGHTS are in the engine", name.c_str());
  }
  if (name.empty() || name.size() == sizeof header.external_name || name.find('/') != std::string::npos ||
      name == "." || name == "..")
    fail(DSV4C_FORMAT, "CHUNKS do not name a weights file beside the engine (found \"%s\")", name.c_str());
  const size_t slash = path.rfind('/');
  external_weights_ = MappedFile(slash == std::string::npos ? name : path.substr(0, slash + 1) + name, "weights file");
  if (external_weights_.size() != header.total_bytes)
    fail(DSV4C_FORMAT, "weights file %s is %" PRIu64 " bytes, the engine says %" PRIu64, name.c_str(),
         external_weights_.size(), header.total_bytes);
  sections_[kWeights].data = external_weights_.data();
}

bool EngineFile::verify_weights(ThreadPool& pool, const std::function<bool(uint64_t, uint64_t)>& progress) const {
  const Bytes weights = sections_[kWeights];
  const std::byte* digests = sections_[kChunks].data + sizeof(ChunkHeader);
  const uint64_t chunk_bytes = chunk_header_.chunk_bytes;
  const uint64_t count = chunk_header_.chunk_count;
  const uint64_t batch = 4 * uint64_t{pool.thread_count()};  // chunks between two calls of `progress`
  for (uint64_t first = 0; first < count; first += batch) {
    const uint64_t last = std::min(first + batch, count);
    std::atomic<uint64_t> bad{count};
    pool.parallel_for(static_cast<int64_t>(last - first), 1, [&](int64_t begin, int64_t end) {
      for (uint64_t chunk = first + begin; chunk < first + end; ++chunk) {
        const uint64_t offset = chunk * chunk_bytes;
        const Digest found = sha256(weights.data + offset, std::min(chunk_bytes, weights.size - offset));
        if (std::memcmp(found.data(), digests + chunk * sizeof(Digest), sizeof(Digest)) == 0) continue;
        uint64_t lowest = bad.load();
        while (chunk < lowest && !bad.compare_exchange_weak(lowest, chunk)) {
        }
      }
    });
    if (bad < count) {
      const uint64_t offset = bad * chunk_bytes;
      fail(DSV4C_DIGEST, "weight chunk %" PRIu64 " (bytes %" PRIu64 " to %" PRIu64 " of WEIGHTS) is damaged",
           bad.load(), offset, std::min(offset + chunk_bytes, weights.size) - 1);
    }
    if (!progress(std::min(last * chunk_bytes, weights.size), weights.size)) return false;
  }
  return true;
}

}  // namespace dsv4c
