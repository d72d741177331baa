#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "engine_format.h"
#include "mapped_file.h"
#include "sha256.h"

namespace dsv4c {

class ThreadPool;

struct Bytes {
  const std::byte* data = nullptr;  // null where the engine has no such section
  uint64_t size = 0;
};

// An engine file whose header, table and sections (but the weights' bytes) have been checked.
class EngineFile {
 public:
  explicit EngineFile(const std::string& path);

  const format::Header& header() const { return header_; }
  std::string arch() const;
  Bytes section(uint32_t type) const { return sections_[type]; }
  // Where the weights can be read without mapping them: an open file, and the place of their first byte in it.
  int weights_descriptor() const { return weights_are_external_ ? external_weights_.descriptor() : file_.descriptor(); }
  uint64_t weights_offset() const;
  const Digest& section_digest(uint32_t type) const { return digests_[type]; }

  // Compares every weight chunk with its digest. False when `progress` (done bytes, total bytes) returned false.
  bool verify_weights(ThreadPool& pool, const std::function<bool(uint64_t, uint64_t)>& progress) const;

 private:
  void check_header();
  void check_table();
  void check_gaps() const;
  void check_section_digests() const;
  void open_weights(const std::string& path);

  MappedFile file_;
  MappedFile external_weights_;
  format::Header header_;
  bool weights_are_external_ = false;
  format::ChunkHeader chunk_header_;
  Bytes sections_[format::kSectionTypeEnd];
  bool present_[format::kSectionTypeEnd] = {};
  Digest digests_[format::kSectionTypeEnd] = {};
};

}  // namespace dsv4c
