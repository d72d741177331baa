// Token ids in, ids out: generate ENGINE MAX_NEW_TOKENS ID...
//
// Prints the ids that follow the prompt, the likeliest each time, up to an end token.
#include <dsv4c/dsv4c.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

namespace {

struct EngineCloser {
  void operator()(dsv4c_engine* engine) const { dsv4c_engine_close(engine); }
};
struct SessionDestroyer {
  void operator()(dsv4c_session* session) const { dsv4c_session_destroy(session); }
};
using Engine = std::unique_ptr<dsv4c_engine, EngineCloser>;
using Session = std::unique_ptr<dsv4c_session, SessionDestroyer>;

void check(dsv4c_status status) {
  if (status == DSV4C_OK) return;
  std::fprintf(stderr, "error: %s\n", dsv4c_last_error());
  std::exit(1);
}

// Runs `ids` from `position` on in slot 0 and returns the likeliest id after the last of them.
int32_t next_id(dsv4c_session* session, const std::vector<int32_t>& ids, int32_t position) {
  const std::vector<int32_t> slots(ids.size(), 0);
  std::vector<int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), position);
  const int32_t last_row = static_cast<int32_t>(ids.size()) - 1;

  dsv4c_step step = {};
  step.struct_size = sizeof step;
  step.row_count = static_cast<uint32_t>(ids.size());
  step.token_ids = ids.data();
  step.slots = slots.data();
  step.positions = positions.data();
  step.logits_rows = &last_row;
  step.logits_count = 1;

  const float temperature = 0, top_p = 1;
  const int32_t top_k = 0;
  const int64_t seed = 0;
  dsv4c_sampling sampling = {};
  sampling.struct_size = sizeof sampling;
  sampling.temperature = &temperature;
  sampling.top_k = &top_k;
  sampling.top_p = &top_p;
  sampling.seed = &seed;

  int32_t id = -1;
  check(dsv4c_session_sample(session, &step, &sampling, &id));
  return id;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s ENGINE MAX_NEW_TOKENS ID...\n", argv[0]);
    return 2;
  }
  const int max_new_tokens = std::atoi(argv[2]);
  std::vector<int32_t> ids;
  for (int i = 3; i < argc; ++i) ids.push_back(std::atoi(argv[i]));

  dsv4c_engine* opened = nullptr;
  check(dsv4c_engine_open(argv[1], nullptr, &opened));
  const Engine engine(opened);
  dsv4c_engine_info info = {};
  info.struct_size = sizeof info;
  check(dsv4c_engine_get_info(engine.get(), &info));

  dsv4c_session_options options = {};
  options.struct_size = sizeof options;
  options.slots = 1;
  options.context = static_cast<uint32_t>(ids.size()) + static_cast<uint32_t>(std::max(max_new_tokens, 0));
  dsv4c_session* created = nullptr;
  check(dsv4c_session_create(engine.get(), &options, &created));
  const Session session(created);

  int32_t position = 0;
  for (int i = 0; i < max_new_tokens; ++i) {
    const int32_t id = next_id(session.get(), ids, position);
    const uint32_t* end = info.eos_token_ids + info.eos_count;
    if (std::find(info.eos_token_ids, end, static_cast<uint32_t>(id)) != end) break;
    std::printf(i == 0 ? "%d" : " %d", id);
    position += static_cast<int32_t>(ids.size());
    ids = {id};
  }
  std::printf("\n");
  return 0;
}
