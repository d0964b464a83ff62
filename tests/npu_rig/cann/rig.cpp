// Settings, counters, errors: what tests reach by ctypes.
#include "rig.hpp"

#include <cstdarg>

namespace rig {
namespace {
std::mutex mutex;
auto &counters = *new std::map<std::string, long>;  // leaked: streams outlive static destruction
auto &settings = *new std::map<std::string, long>;
thread_local std::string error_text;
}  // namespace

void count(const char *name, long n) {
  std::lock_guard<std::mutex> lock(mutex);
  counters[name] += n;
}

long setting(const char *name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = settings.find(name);
  return found == settings.end() ? 0 : found->second;
}

bool take(const char *name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = settings.find(name);
  if (found == settings.end() || found->second <= 0) return false;
  found->second--;
  return true;
}

aclError fail(aclError code, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error_text = text;
  if (getenv("FAKE_ACL_LOG")) fprintf(stderr, "[fake_acl] error %d: %s\n", (int)code, text);
  count("errors");
  return code;
}
}  // namespace rig

extern "C" {
long fake_acl_counter(const char *name);
void fake_acl_reset();
void fake_acl_set(const char *name, long value);

long fake_acl_counter(const char *name) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  return rig::counters[name];
}

// Counters to 0, settings to none. Bytes that are registered stay counted.
void fake_acl_reset() {
  std::lock_guard<std::mutex> lock(rig::mutex);
  long registered = rig::counters["registered_bytes"];
  rig::counters.clear();
  rig::counters["registered_bytes"] = registered;
  rig::settings.clear();
}

void fake_acl_set(const char *name, long value) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  rig::settings[name] = value;
}

const char *aclGetRecentErrMsg() { return rig::error_text.c_str(); }
}
