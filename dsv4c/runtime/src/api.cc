#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "dsv4c/dsv4c.h"
#include "engine.h"
#include "error.h"
#include "session.h"

struct dsv4c_engine {
  std::shared_ptr<const dsv4c::Engine> engine;
};

struct dsv4c_session {
  // Keeps its engine alive.
  dsv4c::Session session;
};

namespace {

using dsv4c::fail;

thread_local std::string last_error;

dsv4c_status set_error(dsv4c_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

// No exception crosses the C interface.
template <typename Body>
dsv4c_status guarded(Body&& body) noexcept {
  try {
    body();
    return DSV4C_OK;
  } catch (const dsv4c::StatusError& error) {
    return set_error(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return set_error(DSV4C_OUT_OF_MEMORY, "no memory for the runtime's own bookkeeping");
  } catch (const std::exception& error) {
    return set_error(DSV4C_INTERNAL, error.what());
  } catch (...) {
    return set_error(DSV4C_INTERNAL, "unknown exception");
  }
}

template <typename T>
T& required(T* pointer, const char* name) {
  if (!pointer) fail(DSV4C_INVALID_ARGUMENT, "%s must not be null", name);
  return *pointer;
}

// The caller's struct as this library knows it: shorter ones are filled with zeros, longer ones cut.
template <typename T>
T read_struct(const T* given, const char* name) {
  uint32_t size = required(given, name).struct_size;
  if (size < sizeof(uint32_t)) fail(DSV4C_INVALID_ARGUMENT, "struct_size of %s is not set", name);
  T known = {};
  std::memcpy(&known, given, std::min<size_t>(size, sizeof known));
  return known;
}

// Marks a session as in use for the length of a call.
class Use {
 public:
  explicit Use(dsv4c_session* session) : in_use_(required(session, "session").session.in_use()) {
    if (in_use_.exchange(true, std::memory_order_acquire))
      fail(DSV4C_BUSY, "the session is in use by another thread or by the callback's own step");
  }
  ~Use() { in_use_.store(false, std::memory_order_release); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  std::atomic<bool>& in_use_;
};

template <typename Body>
dsv4c_status with_session(dsv4c_session* session, Body&& body) noexcept {
  return guarded([&] {
    Use use(session);
    body(session->session);
  });
}

// For the calls about counts, which not every engine keeps.
template <typename Body>
dsv4c_status with_counts(dsv4c_session* session, Body&& body) noexcept {
  return with_session(session, [&](dsv4c::Session& s) {
    if (s.plan().counted_states.empty())
      fail(DSV4C_INVALID_ARGUMENT,
           "the engine does not count its routing; build it with `counts = true` in the recipe's table `[experts]`");
    body(s);
  });
}

template <typename Body>
dsv4c_status with_slot(dsv4c_session* session, uint32_t slot, Body&& body) noexcept {
  return with_session(session, [&](dsv4c::Session& s) {
    s.check_slot(slot);
    body(s.state());
  });
}

}  // namespace

extern "C" {

uint32_t dsv4c_abi_version(void) { return DSV4C_ABI_VERSION; }

const char* dsv4c_version(void) { return DSV4C_VERSION_STRING; }

const char* dsv4c_status_name(dsv4c_status status) {
  static const char* const names[] = {"OK",          "INVALID_ARGUMENT", "IO",   "FORMAT",  "VERSION",  "ARCH",  "DIGEST",
                                      "OUT_OF_MEMORY", "UNSUPPORTED",    "BUSY", "STOPPED", "INTERNAL", "DEVICE"};
  const size_t index = static_cast<size_t>(status);
  return index < std::size(names) ? names[index] : "UNKNOWN";
}

const char* dsv4c_last_error(void) { return last_error.c_str(); }

dsv4c_status dsv4c_engine_open(const char* path, const dsv4c_engine_options* options, dsv4c_engine** engine) {
  return guarded([&] {
    required(engine, "engine") = nullptr;
    required(path, "path");
    dsv4c_engine_options known = {};
    if (options) known = read_struct(options, "options");
    *engine = new dsv4c_engine{std::make_shared<const dsv4c::Engine>(path, known.threads, known.device)};
  });
}

void dsv4c_engine_close(dsv4c_engine* engine) { delete engine; }

dsv4c_status dsv4c_engine_get_info(const dsv4c_engine* engine, dsv4c_engine_info* info) {
  return guarded([&] {
    const dsv4c::Engine& e = *required(engine, "engine").engine;
    const uint32_t size = required(info, "info").struct_size;
    if (size < sizeof(uint32_t)) fail(DSV4C_INVALID_ARGUMENT, "struct_size of info is not set");
    const dsv4c::format::PlanHeader& plan = e.plan().header;
    dsv4c_engine_info known = {};
    known.struct_size = size;
    known.format_version = e.file().header().format_version;
    std::strncpy(known.arch, e.file().arch().c_str(), sizeof known.arch - 1);
    known.world_size = plan.world_size;
    known.rank = plan.rank;
    known.vocab_size = plan.vocab_size;
    known.max_context = plan.max_context;
    known.layer_count = plan.layer_count;
    known.hidden_size = plan.hidden_size;
    known.block_tokens = plan.block_tokens;
    known.rollback_rows = plan.rollback_rows;
    known.bos_token_id =
        plan.bos_token_id < plan.vocab_size ? static_cast<int32_t>(plan.bos_token_id) : DSV4C_NO_TOKEN;
    known.eos_count = static_cast<uint32_t>(e.plan().eos_ids.size());
    known.threads = e.pool().thread_count();
    known.eos_token_ids = e.plan().eos_ids.data();
    known.weight_bytes = plan.weight_bytes;
    std::strncpy(known.device, e.machine().name.c_str(), sizeof known.device - 1);
    known.sm_count = e.machine().sm_count;
    known.weight_seconds = e.backend().weight_seconds();
    known.counted_layers = static_cast<uint32_t>(e.plan().counted_states.size());
    known.counted_experts = e.plan().counted_experts();
    std::memcpy(info, &known, std::min<size_t>(size, sizeof known));
  });
}

dsv4c_status dsv4c_engine_section(const dsv4c_engine* engine, uint32_t type, const void** data, uint64_t* size) {
  return guarded([&] {
    required(engine, "engine");
    if (type == 0 || type >= dsv4c::format::kSectionTypeEnd)
      fail(DSV4C_INVALID_ARGUMENT, "section type %u is unknown", type);
    const dsv4c::Bytes bytes = engine->engine->file().section(type);
    required(data, "data") = bytes.data;
    required(size, "size") = bytes.size;
  });
}

dsv4c_status dsv4c_engine_verify_weights(const dsv4c_engine* engine, dsv4c_progress_fn progress, void* user) {
  return guarded([&] {
    const dsv4c::Engine& e = *required(engine, "engine").engine;
    const bool finished = e.file().verify_weights(e.pool(), [&](uint64_t done, uint64_t total) {
      return !progress || progress(user, done, total) == 0;
    });
    if (!finished) fail(DSV4C_STOPPED, "the callback stopped the verification");
  });
}

dsv4c_status dsv4c_session_create(dsv4c_engine* engine, const dsv4c_session_options* options,
                                  dsv4c_session** session) {
  return guarded([&] {
    required(session, "session") = nullptr;
    const auto& shared = required(engine, "engine").engine;
    dsv4c_session_options known = {};
    if (options) known = read_struct(options, "options");
    if (known.slots == 0) known.slots = 1;
    if (known.context == 0) known.context = shared->plan().header.max_context;
    if (known.flags & ~static_cast<uint32_t>(DSV4C_SESSION_POISON | DSV4C_SESSION_NO_GRAPHS))
      fail(DSV4C_INVALID_ARGUMENT, "session flags %u are unknown", known.flags);
    dsv4c::ExecutorOptions executor;
    executor.poison = known.flags & DSV4C_SESSION_POISON;
    executor.graphs = !(known.flags & DSV4C_SESSION_NO_GRAPHS);
    *session = new dsv4c_session{{shared, known.slots, known.context, executor}};
  });
}

void dsv4c_session_destroy(dsv4c_session* session) { delete session; }

dsv4c_status dsv4c_session_step(dsv4c_session* session, const dsv4c_step* step, float* logits, uint64_t logits_size) {
  return with_session(session,
                      [&](dsv4c::Session& s) { s.step(read_struct(step, "step"), logits, logits_size); });
}

dsv4c_status dsv4c_session_sample(dsv4c_session* session, const dsv4c_step* step, const dsv4c_sampling* sampling,
                                  int32_t* ids) {
  return with_session(session, [&](dsv4c::Session& s) {
    s.sample(read_struct(step, "step"), read_struct(sampling, "sampling"), ids);
  });
}

dsv4c_status dsv4c_session_trace(dsv4c_session* session, const dsv4c_step* step, dsv4c_trace_fn callback,
                                 void* user) {
  return with_session(session, [&](dsv4c::Session& s) { s.trace(read_struct(step, "step"), callback, user); });
}

dsv4c_status dsv4c_session_length(dsv4c_session* session, uint32_t slot, uint32_t* length) {
  return with_slot(session, slot,
                   [&](dsv4c::SessionState& state) { required(length, "length") = state.length(slot); });
}

dsv4c_status dsv4c_session_reset(dsv4c_session* session, uint32_t slot) {
  return with_slot(session, slot, [&](dsv4c::SessionState& state) { state.reset(slot); });
}

dsv4c_status dsv4c_session_truncate(dsv4c_session* session, uint32_t slot, uint32_t position) {
  return with_slot(session, slot, [&](dsv4c::SessionState& state) { state.truncate(slot, position); });
}

dsv4c_status dsv4c_session_fork(dsv4c_session* session, uint32_t source, uint32_t destination) {
  return with_session(session, [&](dsv4c::Session& s) {
    s.check_slot(source);
    s.check_slot(destination);
    s.state().fork(source, destination);
  });
}

dsv4c_status dsv4c_session_save_size(dsv4c_session* session, uint32_t slot, uint64_t* size) {
  return with_slot(session, slot,
                   [&](dsv4c::SessionState& state) { required(size, "size") = state.save_size(slot); });
}

dsv4c_status dsv4c_session_save(dsv4c_session* session, uint32_t slot, void* data, uint64_t size) {
  return with_slot(session, slot, [&](dsv4c::SessionState& state) {
    required(static_cast<std::byte*>(data), "data");
    const unsigned long long needed = state.save_size(slot);
    if (size != needed)
      fail(DSV4C_INVALID_ARGUMENT, "the saved slot takes %llu bytes, not %llu", needed,
           static_cast<unsigned long long>(size));
    state.save(slot, static_cast<std::byte*>(data));
  });
}

dsv4c_status dsv4c_session_restore(dsv4c_session* session, uint32_t slot, const void* data, uint64_t size) {
  return with_slot(session, slot, [&](dsv4c::SessionState& state) {
    required(static_cast<const std::byte*>(data), "data");
    state.restore(slot, static_cast<const std::byte*>(data), size);
  });
}

dsv4c_status dsv4c_session_routing_counts(dsv4c_session* session, uint32_t* layers, uint64_t* counts,
                                          uint64_t counts_size) {
  return with_counts(session, [&](dsv4c::Session& s) {
    const dsv4c::Plan& plan = s.plan();
    required(counts, "counts");
    const unsigned long long needed = uint64_t{plan.counted_states.size()} * plan.counted_experts();
    if (counts_size < needed)
      fail(DSV4C_INVALID_ARGUMENT, "the counts of %zu layers with %u experts are %llu numbers, there is room for %llu",
           plan.counted_states.size(), plan.counted_experts(), needed, static_cast<unsigned long long>(counts_size));
    s.state().read_routing_counts(counts);
    if (!layers) return;
    for (uint32_t index : plan.counted_states) *layers++ = plan.states[index].layer;
  });
}

dsv4c_status dsv4c_session_reset_routing_counts(dsv4c_session* session) {
  return with_counts(session, [](dsv4c::Session& s) { s.state().reset_routing_counts(); });
}

}  // extern "C"
