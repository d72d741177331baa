#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace dsv4c {

void fail(dsv4c_status status, const char* format, ...) {
  char message[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, sizeof message, format, args);
  va_end(args);
  throw StatusError(status, message);
}

}  // namespace dsv4c
