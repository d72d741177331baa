#include "engine.h"

#include "cpu_backend.h"
#include "cuda/cuda_backend.h"
#include "topology_check.h"

namespace dsv4c {
namespace {

std::unique_ptr<Backend> make_backend(const EngineFile& file, ThreadPool& pool, const std::string& path,
                                      unsigned device) {
  if (file.arch() == "cpu") return std::make_unique<CpuBackend>(pool, file.section(format::kWeights).data);
  const size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  return std::make_unique<cuda::CudaBackend>(file, name, device, pool.thread_count());
}

}  // namespace

Engine::Engine(const std::string& path, unsigned threads, unsigned device)
    : file_(path), pool_(threads), backend_(make_backend(file_, pool_, path, device)), machine_(backend_->machine()) {
  plan_ = read_plan(file_.section(format::kPlan), file_.header(), file_.section(format::kWeights).size, machine_);
  if (machine_.runs_images()) check_topologies(plan_, file_.section(format::kWeights));
  backend_->load(plan_);
  Sha256 hash;
  hash.update(file_.section_digest(format::kPlan).data(), sizeof(Digest));
  hash.update(file_.section_digest(format::kChunks).data(), sizeof(Digest));
  digest_ = hash.finish();
}

}  // namespace dsv4c
