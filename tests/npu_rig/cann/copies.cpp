// Copies: checked when they are submitted, and again when they run.
#include "rig.hpp"

#include <algorithm>

static_assert(sizeof(aclrtMemLocation) == 8 && offsetof(aclrtMemLocation, type) == 4, "aclrtMemLocation");
static_assert(sizeof(aclrtMemcpyBatchAttr) == 32 && offsetof(aclrtMemcpyBatchAttr, srcLoc) == 8, "batch attributes");
static_assert(ACL_MEM_LOCATION_TYPE_HOST == 0 && ACL_MEM_LOCATION_TYPE_DEVICE == 1, "kinds of location");
static_assert(ACL_MEMCPY_HOST_TO_DEVICE == 1 && ACL_MEMCPY_DEVICE_TO_HOST == 2, "kinds of copy");

namespace rig {
namespace {
// Fill in the sides of `copy` by `kind`, and check the range.
aclError check(const char *name, Copy &copy, size_t room, aclrtMemcpyKind kind, bool async) {
  auto bad = [&](const char *why) {
    return fail(BAD_PARAMETER, "%s: %s (target %p, source %p, %zu bytes into %zu, kind %d)", name, why,
                (void *)copy.target, (const void *)copy.source, copy.size, room, (int)kind);
  };
  if (!copy.target || !copy.source) return bad("null pointer");
  if (copy.size > room) return bad("more bytes than room");
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      if (async) return fail(NOT_SUPPORTED, "%s: within the host", name);
      copy.from = HOST, copy.to = HOST;
      break;
    case ACL_MEMCPY_HOST_TO_DEVICE: copy.from = HOST, copy.to = DEVICE; break;
    case ACL_MEMCPY_DEVICE_TO_HOST: copy.from = DEVICE, copy.to = HOST; break;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE: copy.from = DEVICE, copy.to = DEVICE; break;
    case ACL_MEMCPY_DEFAULT:
      copy.from = on_device(copy.source) ? DEVICE : HOST, copy.to = on_device(copy.target) ? DEVICE : HOST;
      break;
    default: return bad("unknown kind");
  }
  if (copy.to == HOST && on_device(copy.target)) return bad("the target is device memory");
  if (copy.from == HOST && on_device(copy.source)) return bad("the source is device memory");
  return holds(copy) ? OK : bad("beyond device memory");
}

aclError submit(const char *name, std::vector<Copy> copies, aclrtStream handle) {
  auto stream = stream_of(handle);
  if (!stream) return fail(BAD_STREAM, "%s: no such stream", name);
  if (take("refuse_next_copy")) return fail(DRIVER_ERROR, "%s: refused", name);
  for (auto &copy : copies)
    if (copy.to != copy.from) count(copy.to == DEVICE ? "h2d_bytes" : "d2h_bytes", (long)copy.size);
  if (take("fail_next_copy")) {
    stream->push([](Stream &on) { on.error = DRIVER_ERROR; });
    return OK;
  }
  if (!all_pinned(copies)) {  // what the headers say of such memory: the call returns when the bytes have moved
    count("unpinned_async");
    stream->synchronize();
    for (auto &copy : copies)
      if (!copy_now(copy, false)) return fail(DRIVER_ERROR, "%s: a range is gone", name);
    return OK;
  }
  for (auto &copy : copies)  // a task each: on a 910B the runtime itself takes batches apart
    stream->push([copy, name](Stream &on) {
      if (setting("device_gone") || copy_now(copy, true)) return;
      fprintf(stderr, "[fake_acl] %s: memory freed or unregistered while a copy was in flight\n", name);
      count("inflight_violation");
      on.error = DRIVER_ERROR;
    });
  return OK;
}

struct Batch {
  void **targets;
  size_t *rooms;
  void **sources;
  size_t *sizes, many;
  aclrtMemcpyBatchAttr *attributes;
  size_t *firsts, kinds;
};

aclError check_batch(const char *name, const Batch &batch, size_t *failed, std::vector<Copy> &copies) {
  if (setting("no_batches")) return fail(NOT_SUPPORTED, "%s: not on this device", name);
  if (!batch.targets || !batch.rooms || !batch.sources || !batch.sizes || !batch.attributes || !batch.firsts || !failed)
    return fail(BAD_PARAMETER, "%s: null argument", name);
  *failed = SIZE_MAX;
  if (batch.many > BATCH_MOST) return fail(NOT_SUPPORTED, "%s: %zu pieces", name, batch.many);
  if (!batch.many || !batch.kinds || batch.kinds > batch.many || batch.firsts[0])
    return fail(BAD_PARAMETER, "%s: %zu pieces, %zu attributes", name, batch.many, batch.kinds);
  for (size_t i = 1; i < batch.kinds; i++)
    if (batch.firsts[i] <= batch.firsts[i - 1] || batch.firsts[i] >= batch.many)
      return fail(BAD_PARAMETER, "%s: attribute %zu begins out of order", name, i);
  for (size_t i = 0, kind = 0; i < batch.many; i++) {
    while (kind + 1 < batch.kinds && i >= batch.firsts[kind + 1]) kind++;
    auto &attribute = batch.attributes[kind];
    bool to = attribute.dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    bool from = attribute.srcLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    if (std::any_of(attribute.rsv, attribute.rsv + 16, [](uint8_t byte) { return byte; }))
      return fail(BAD_PARAMETER, "%s: reserved bytes of attribute %zu", name, kind);
    *failed = i;
    if (to == from) return fail(BAD_PARAMETER, "%s: piece %zu goes from host to device or back, or not at all", name, i);
    uint32_t location = to ? attribute.dstLoc.id : attribute.srcLoc.id;
    if (location != (uint32_t)setting("location"))
      return fail(BAD_PARAMETER, "%s: piece %zu is not on device %u", name, i, location);
    if (!batch.sizes[i]) return fail(BAD_PARAMETER, "%s: piece %zu is empty", name, i);
    Copy copy{(char *)batch.targets[i], (char *)batch.sources[i], batch.sizes[i], HOST, HOST};
    auto kind_of = to ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
    if (aclError error = check(name, copy, batch.rooms[i], kind_of, true)) return error;
    copies.push_back(copy);
  }
  *failed = SIZE_MAX;
  count("batch_calls"), count("batch_entries", (long)batch.many);
  return OK;
}
}  // namespace
}  // namespace rig

using namespace rig;

extern "C" {
// Device memory by the rig's own means, for tests that must not trust what they test.
int fake_acl_peek(const void *address, void *found, size_t size);
int fake_acl_poke(void *address, const void *bytes, size_t size);

int fake_acl_peek(const void *address, void *found, size_t size) {
  return copy_now({(char *)found, (const char *)address, size, HOST, DEVICE}, false) ? 0 : -1;
}

int fake_acl_poke(void *address, const void *bytes, size_t size) {
  return copy_now({(char *)address, (const char *)bytes, size, DEVICE, HOST}, false) ? 0 : -1;
}

aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t size, aclrtMemcpyKind kind) {
  NEED_CONTEXT();
  if (!size) return OK;
  Copy copy{(char *)target, (const char *)source, size, HOST, HOST};
  if (aclError error = check(__func__, copy, room, kind, false)) return error;
  count("memcpy_sync");
  return copy_now(copy, false) ? OK : fail(DRIVER_ERROR, "aclrtMemcpy: a range is gone");
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t size, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  NEED_CONTEXT();
  if (!size) return OK;
  Copy copy{(char *)target, (const char *)source, size, HOST, HOST};
  if (aclError error = check(__func__, copy, room, kind, true)) return error;
  count("memcpy_async");
  return submit("aclrtMemcpyAsync", {copy}, stream);
}

aclError aclrtMemcpyAsyncWithCondition(void *target, size_t room, const void *source, size_t size,
                                       aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(target, room, source, size, kind, stream);
}

aclError aclrtMemcpyBatchAsync(void **targets, size_t *rooms, void **sources, size_t *sizes, size_t many,
                               aclrtMemcpyBatchAttr *attributes, size_t *firsts, size_t kinds, size_t *failed,
                               aclrtStream stream) {
  NEED_CONTEXT();
  std::vector<Copy> copies;
  Batch batch{targets, rooms, sources, sizes, many, attributes, firsts, kinds};
  if (aclError error = check_batch(__func__, batch, failed, copies)) return error;
  return submit("aclrtMemcpyBatchAsync", std::move(copies), stream);
}

aclError aclrtMemcpyBatch(void **targets, size_t *rooms, void **sources, size_t *sizes, size_t many,
                          aclrtMemcpyBatchAttr *attributes, size_t *firsts, size_t kinds, size_t *failed) {
  NEED_CONTEXT();
  std::vector<Copy> copies;
  Batch batch{targets, rooms, sources, sizes, many, attributes, firsts, kinds};
  if (aclError error = check_batch(__func__, batch, failed, copies)) return error;
  for (auto &copy : copies)
    if (!copy_now(copy, false)) return fail(DRIVER_ERROR, "aclrtMemcpyBatch: a range is gone");
  return OK;
}

aclError aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t size, aclrtStream handle) {
  NEED_CONTEXT();
  auto stream = stream_of(handle);
  if (!stream) return fail(BAD_STREAM, "aclrtMemsetAsync: no such stream");
  stream->push([=](Stream &on) {
    if (aclError error = aclrtMemset(address, room, value, size)) on.error = error;
  });
  return OK;
}
}
