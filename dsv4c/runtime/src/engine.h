#pragma once

#include <memory>
#include <string>

#include "backend.h"
#include "engine_file.h"
#include "plan_reader.h"
#include "thread_pool.h"

namespace dsv4c {

// An open engine: immutable, shared by its sessions and by threads.
class Engine {
 public:
  // `device` is the index of the GPU, for engines that need one.
  Engine(const std::string& path, unsigned threads, unsigned device);

  const EngineFile& file() const { return file_; }
  const Plan& plan() const { return plan_; }
  const Backend& backend() const { return *backend_; }
  const Machine& machine() const { return machine_; }
  ThreadPool& pool() const { return pool_; }
  // Of plan and weights: states of sessions belong to engines that share it.
  const Digest& digest() const { return digest_; }

 private:
  EngineFile file_;
  mutable ThreadPool pool_;
  std::unique_ptr<Backend> backend_;
  Machine machine_;
  Plan plan_;
  Digest digest_;
};

}  // namespace dsv4c
