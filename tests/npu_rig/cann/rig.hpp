// One simulated Ascend device behind libascendcl.so, compiled against the ACL headers of the torch_npu wheel: a call
// whose signature has drifted is a compile error. See ../README.md.
//
// Where the behaviour comes from:
// - The headers: signatures, the layouts of structures, and the rule that an asynchronous copy from or to memory that is
//   not page-locked returns only when the copy is done.
// - CANN's reference and the source of its runtime (hicann/runtime): events created by `aclrtCreateEventExWithFlag` may
//   be recorded more than once, count as complete before they are first recorded, and cannot be reset. After a failed
//   task, a stream continues, and its events complete; only the next synchronisation reports the failure. A batch must
//   name the device of its addresses, and has at most 4,096 entries. A stream holds about 2,000 tasks; further
//   submissions wait.
// - Our own choice: memory that `aclrtHostRegister` has mapped does not count as page-locked.
#pragma once

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace rig {

constexpr aclError OK = ACL_SUCCESS;
constexpr aclError BAD_PARAMETER = 107000;
constexpr aclError BAD_DEVICE = 107001;
constexpr aclError NO_CONTEXT = 107002;
constexpr aclError BAD_STREAM = 107003;
constexpr aclError BAD_EVENT = 107004;
constexpr aclError NOT_SUPPORTED = 207000;
constexpr aclError OUT_OF_MEMORY = 207001;
constexpr aclError SYNC_TIMEOUT = 507046;
constexpr aclError LOST_HEARTBEAT = 507010;
constexpr aclError DRIVER_ERROR = 507899;

constexpr size_t PAGE = 4096, GRANULE = 2u << 20;
constexpr size_t BATCH_MOST = 4096;   // DEVMM_MEMCPY_BATCH_MAX_COUNT
constexpr size_t QUEUE_MOST = 2013;   // tasks of a stream: 2,048 less 35 on a 910B

// What tests read and set, by name.
void count(const char *name, long n = 1);
long setting(const char *name);
bool take(const char *name);  // true, and one less, while the setting is positive

// Every call that fails goes through here: the thread's error text is what aclGetRecentErrMsg returns.
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

inline thread_local int device = -1;  // of this thread
#define NEED_CONTEXT() \
  do { \
    if (rig::device < 0) return rig::fail(rig::NO_CONTEXT, "%s: aclrtSetDevice was not called in this thread", __func__); \
    if (rig::setting("device_gone")) return rig::fail(rig::LOST_HEARTBEAT, "%s: the device is gone", __func__); \
  } while (0)

// Memory. Device addresses are PROT_NONE: whoever follows one on the host gets SIGSEGV; the bytes lie in `shadow`.
struct Region { char *base; size_t size; char *shadow; };
struct Host { char *base; size_t size; bool owned, pinned, mapped; char *alias; };
enum Side { HOST, DEVICE };
struct Copy { char *target; const char *source; size_t size; Side to, from; };

bool copy_now(const Copy &copy, bool must_be_pinned);  // false where a range is gone
bool holds(const Copy &copy);                          // whether the device's side is device memory
bool all_pinned(const std::vector<Copy> &copies);      // each inside one registration
bool on_device(const void *address);
size_t round_up(size_t n, size_t unit);
char *reserve(size_t size, int protection);

// Streams: a thread each, operations in order, beside the host.
struct Stream {
  int id;
  std::mutex mutex;
  std::condition_variable pushed, popped;
  std::deque<std::function<void(Stream &)>> queue;
  bool busy = false, stopping = false;
  aclError error = OK;  // of a copy; told once, by the next synchronisation, as with ACL_CONTINUE_ON_FAILURE
  std::thread thread;

  explicit Stream(int number);
  ~Stream();
  void push(std::function<void(Stream &)> operation);  // waits while the queue is full
  bool idle();
  aclError synchronize(int milliseconds = -1);

 private:
  void run();
};
std::shared_ptr<Stream> stream_of(aclrtStream handle);

}  // namespace rig
