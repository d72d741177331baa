// The entry that the runner calls, behind a kernel's source. The kernel is named by EMULATE_ENTRY.
#pragma once

#include <cstdio>

namespace {

template <typename... Parameters, size_t... Places>
void call(void (*kernel)(Parameters...), void* const* pointers, std::index_sequence<Places...>) {
  kernel((Parameters)pointers[Places]...);
}

template <typename... Parameters>
constexpr unsigned parameter_count(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

template <typename... Parameters>
void call(void (*kernel)(Parameters...), void* const* pointers) {
  call(kernel, pointers, std::index_sequence_for<Parameters...>());
}

void* const* launch_pointers;

}  // namespace

// Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* dsv4c_emulate(
    const unsigned* grid, unsigned block, unsigned shared_bytes, void* const* pointers, unsigned count, int order) {
  if (count != parameter_count(EMULATE_ENTRY)) {
    std::snprintf(emulate::message, sizeof emulate::message, "the kernel takes %u pointers, the call has %u",
                  parameter_count(EMULATE_ENTRY), count);
    return emulate::message;
  }
  launch_pointers = pointers;
  emulate::body = [] { call(EMULATE_ENTRY, launch_pointers); };
  return emulate::launch(grid, block, shared_bytes, order);
}
