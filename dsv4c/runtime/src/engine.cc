#include "engine.h"

#include "cpu_backend.h"

namespace dsv4c {

Engine::Engine(const std::string& path, unsigned threads)
    : file_(path, "cpu"), pool_(threads), backend_(std::make_unique<CpuBackend>(pool_)) {
  plan_ = read_plan(file_.section(format::kPlan), file_.header(), file_.section(format::kWeights).size,
                    [this](std::string_view name) { return backend_->has_kernel(name); });
  backend_->load(plan_);
  Sha256 hash;
  hash.update(file_.section_digest(format::kPlan).data(), sizeof(Digest));
  hash.update(file_.section_digest(format::kChunks).data(), sizeof(Digest));
  digest_ = hash.finish();
}

}  // namespace dsv4c
