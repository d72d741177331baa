#pragma once

#include <stdexcept>
#include <string>

#include "dsv4c/dsv4c.h"

namespace dsv4c {

// What the C functions turn into a status and the thread's last error.
class StatusError : public std::runtime_error {
 public:
  StatusError(dsv4c_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  dsv4c_status status() const { return status_; }

 private:
  dsv4c_status status_;
};

[[noreturn]] void fail(dsv4c_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace dsv4c
