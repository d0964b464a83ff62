// Streams and events.
#include "rig.hpp"

static_assert(ACL_EVENT_SYNC == 1 && ACL_EVENT_TIME_LINE == 8, "event flags");
static_assert(ACL_EVENT_RECORDED_STATUS_COMPLETE == 1 && ACL_STREAM_STATUS_COMPLETE == 0, "statuses");

namespace rig {
namespace {
struct Event {
  std::mutex mutex;
  std::condition_variable ran;
  uint32_t flags = 0;
  bool extended = true;  // made by aclrtCreateEventExWithFlag
  uint64_t recorded = 0, done = 0;
  std::chrono::steady_clock::time_point time;

  // Never recorded counts as done (aclrtRecordEvent's reference).
  bool complete() {
    std::lock_guard<std::mutex> lock(mutex);
    return done >= recorded;
  }
  void wait_for(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    ran.wait(lock, [&] { return done >= number; });
  }
};

std::mutex mutex;  // of the tables
auto &streams = *new std::unordered_map<void *, std::shared_ptr<Stream>>;
auto &events = *new std::unordered_map<void *, std::shared_ptr<Event>>;
auto &default_stream = *new std::shared_ptr<Stream>;
int last_id = 0;

std::mutex gate_mutex;
std::condition_variable gate_opened;
bool gate_is_open = true;

std::shared_ptr<Event> event_of(aclrtEvent handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

aclError synchronize_all(int milliseconds) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto &entry : streams) all.push_back(entry.second);
    if (default_stream) all.push_back(default_stream);
  }
  aclError error = OK;
  for (auto &stream : all)
    if (aclError found = stream->synchronize(milliseconds)) error = found;
  return error;
}

aclError create_event(aclrtEvent *event, uint32_t flags, bool extended) {
  auto made = std::make_shared<Event>();
  made->flags = flags, made->extended = extended;
  std::lock_guard<std::mutex> lock(mutex);
  events[made.get()] = made, *event = made.get();
  return OK;
}
}  // namespace

Stream::Stream(int number) : id(number) { thread = std::thread([this] { run(); }); }

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
  }
  pushed.notify_all();
  if (thread.joinable()) thread.join();
}

void Stream::run() {
  device = 0;
  for (;;) {
    std::function<void(Stream &)> operation;
    {
      std::unique_lock<std::mutex> lock(mutex);
      pushed.wait(lock, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      operation = std::move(queue.front());
      queue.pop_front();
      busy = true;
    }
    if (long us = setting("delay_us")) usleep((useconds_t)us);
    operation(*this);
    std::lock_guard<std::mutex> lock(mutex);
    busy = false;
    popped.notify_all();
  }
}

void Stream::push(std::function<void(Stream &)> operation) {
  std::unique_lock<std::mutex> lock(mutex);
  if (queue.size() >= QUEUE_MOST) {
    count("queue_full");
    popped.wait(lock, [&] { return queue.size() < QUEUE_MOST; });
  }
  queue.push_back(std::move(operation));
  pushed.notify_one();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex);
  return queue.empty() && !busy;
}

aclError Stream::synchronize(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex);
  auto is_idle = [&] { return queue.empty() && !busy; };
  if (milliseconds < 0)
    popped.wait(lock, is_idle);
  else if (!popped.wait_for(lock, std::chrono::milliseconds(milliseconds), is_idle))
    return SYNC_TIMEOUT;
  aclError told = error;
  error = OK;
  return told ? fail(told, "stream %d: a task has failed", id) : OK;
}

std::shared_ptr<Stream> stream_of(aclrtStream handle) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!handle) {
    if (!default_stream) default_stream = std::make_shared<Stream>(0);
    return default_stream;
  }
  auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}
}  // namespace rig

using namespace rig;

#define STREAM(name, handle) \
  auto name = stream_of(handle); \
  if (!name) return fail(BAD_STREAM, "%s: no such stream", __func__)
#define EVENT(name, handle) \
  auto name = event_of(handle); \
  if (!name) return fail(BAD_EVENT, "%s: no such event", __func__)

extern "C" {
int fake_acl_delay(aclrtStream handle, long us);
int fake_acl_hold(aclrtStream handle);
void fake_acl_release();
void fake_acl_finish();

// What is queued on the stream from now on runs `us` later.
int fake_acl_delay(aclrtStream handle, long us) {
  STREAM(stream, handle);
  stream->push([us](Stream &) { usleep((useconds_t)us); });
  return OK;
}

// What is queued on the stream from now on runs after fake_acl_release.
int fake_acl_hold(aclrtStream handle) {
  STREAM(stream, handle);
  {
    std::lock_guard<std::mutex> lock(gate_mutex);
    gate_is_open = false;
  }
  stream->push([](Stream &) {
    std::unique_lock<std::mutex> lock(gate_mutex);
    gate_opened.wait(lock, [] { return gate_is_open; });
  });
  return OK;
}

void fake_acl_release() {
  std::lock_guard<std::mutex> lock(gate_mutex);
  gate_is_open = true;
  gate_opened.notify_all();
}

// Waits until all that is queued has run, also of a device that is gone. Its failures are forgotten.
void fake_acl_finish() {
  fake_acl_release();
  synchronize_all(10'000);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t) {
  NEED_CONTEXT();
  if (priority > 7) return fail(BAD_PARAMETER, "aclrtCreateStreamWithConfig: priority %u", priority);
  auto made = std::make_shared<Stream>(++last_id);
  std::lock_guard<std::mutex> lock(rig::mutex);
  streams[made.get()] = made, *handle = made.get();
  count("streams");
  return OK;
}

aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }

aclError aclrtDestroyStream(aclrtStream handle) {
  NEED_CONTEXT();
  STREAM(stream, handle);
  {
    std::lock_guard<std::mutex> lock(rig::mutex);
    streams.erase(handle);
  }
  stream->synchronize();
  count("streams", -1);
  return OK;
}

aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtSynchronizeStream(aclrtStream handle) {
  NEED_CONTEXT();
  STREAM(stream, handle);
  return stream->synchronize();
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t milliseconds) {
  NEED_CONTEXT();
  STREAM(stream, handle);
  return stream->synchronize(milliseconds);
}

aclError aclrtSynchronizeDevice() {
  NEED_CONTEXT();
  return synchronize_all(-1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  NEED_CONTEXT();
  return synchronize_all(milliseconds);
}

// Says nothing of failures.
aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  NEED_CONTEXT();
  STREAM(stream, handle);
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return OK;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  STREAM(stream, handle);
  *id = stream->id;
  return OK;
}

aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return OK; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return OK; }

aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void *argument) {
  STREAM(stream, handle);
  stream->push([=](Stream &) { function(argument); });
  return OK;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
  NEED_CONTEXT();
  return create_event(event, flags, true);
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) {
  NEED_CONTEXT();
  return create_event(event, flags, false);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  return events.erase(handle) ? OK : fail(BAD_EVENT, "aclrtDestroyEvent: no such event");
}

// Completes whether or not what is before it has failed.
aclError aclrtRecordEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
  NEED_CONTEXT();
  EVENT(event, event_handle);
  STREAM(stream, stream_handle);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  stream->push([event, number](Stream &) {
    std::lock_guard<std::mutex> lock(event->mutex);
    if (number > event->done) event->done = number, event->time = std::chrono::steady_clock::now();
    event->ran.notify_all();
  });
  return OK;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
  EVENT(event, handle);
  return event->extended ? fail(NOT_SUPPORTED, "aclrtResetEvent: of aclrtCreateEventExWithFlag") : OK;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent event_handle) {
  NEED_CONTEXT();
  EVENT(event, event_handle);
  STREAM(stream, stream_handle);
  if (event->extended && !(event->flags & ACL_EVENT_SYNC))
    return fail(BAD_PARAMETER, "aclrtStreamWaitEvent: an event without ACL_EVENT_SYNC");
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = event->recorded;
  }
  stream->push([event, number](Stream &) { event->wait_for(number); });
  return OK;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  NEED_CONTEXT();
  EVENT(event, handle);
  *status = event->complete() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return OK;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
  EVENT(event, handle);
  if (event->extended) return fail(NOT_SUPPORTED, "aclrtQueryEventWaitStatus: of aclrtCreateEventExWithFlag");
  *status = event->complete() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return OK;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  NEED_CONTEXT();
  EVENT(event, handle);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = event->recorded;
  }
  event->wait_for(number);
  return OK;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent begin_handle, aclrtEvent end_handle) {
  EVENT(begin, begin_handle);
  EVENT(end, end_handle);
  if (!(begin->flags & end->flags & ACL_EVENT_TIME_LINE))
    return fail(BAD_PARAMETER, "aclrtEventElapsedTime: an event without ACL_EVENT_TIME_LINE");
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return OK;
}
}
