// Device memory, host memory that is page-locked, and the bytes of both.
#include "rig.hpp"

#include <algorithm>

static_assert(sizeof(aclrtPtrAttributes) == 28 && offsetof(aclrtPtrAttributes, pageSize) == 8, "aclrtPtrAttributes");
static_assert(ACL_HOST_REG_MAPPED == 0x2UL && ACL_HOST_REG_PINNED == 0x10000000UL, "host register flags");

namespace rig {
namespace {
struct Physical { size_t size; char *shadow; };

std::mutex mutex;  // of all below
auto &regions = *new std::map<char *, Region>;
auto &hosts = *new std::map<char *, Host>;
auto &reserved = *new std::map<char *, size_t>;
size_t used = 0;

size_t total() {
  static const char *text = getenv("FAKE_ACL_HBM_MB");
  return (size_t)(text ? atol(text) : 4096) << 20;
}

template <class Table> auto *find(Table &table, const void *address) {
  auto found = table.upper_bound((char *)address);
  if (found == table.begin()) return (decltype(&found->second)) nullptr;
  auto &entry = (--found)->second;
  return (char *)address < entry.base + entry.size ? &entry : nullptr;
}

// Call `each(shadow, offset, bytes)` for the pieces of a device range, which may cross mappings (expandable segments).
bool walk(const void *address, size_t size, const std::function<void(char *, size_t, size_t)> &each) {
  auto at = (char *)address;
  for (size_t done = 0; done < size;) {
    auto *region = find(regions, at);
    if (!region) return false;
    size_t piece = std::min(size - done, (size_t)(region->base + region->size - at));
    each(region->shadow + (at - region->base), done, piece);
    at += piece, done += piece;
  }
  return find(regions, address) != nullptr;
}

bool device_holds(const void *address, size_t size) {
  return walk(address, size, [](char *, size_t, size_t) {});
}

// One registration holds it all: what crosses two counts as not pinned.
bool is_pinned(const void *address, size_t size) {
  auto *host = find(hosts, address);
  return host && host->pinned && (char *)address + size <= host->base + host->size;
}

aclError allocate(void **address, size_t size) {
  if (!address || !size) return fail(BAD_PARAMETER, "aclrtMalloc: bad argument");
  size = round_up(size, 512);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (used + size > total()) return OUT_OF_MEMORY;
    used += size;
  }
  char *base = reserve(round_up(size, GRANULE) + GRANULE, PROT_NONE);
  char *shadow = reserve(round_up(size, PAGE), PROT_READ | PROT_WRITE);
  if (!base || !shadow) return OUT_OF_MEMORY;
  base = (char *)round_up((size_t)base, GRANULE);
  std::lock_guard<std::mutex> lock(mutex);
  regions[base] = Region{base, size, shadow};
  *address = base;
  return OK;
}

aclError add_host(char *base, size_t size, bool owned, bool pinned, bool mapped) {
  if (!owned && ((size_t)base % PAGE || size % PAGE))
    return fail(DRIVER_ERROR, "host register: %p+%zu is not aligned to pages of 4 KiB", (void *)base, size);
  std::lock_guard<std::mutex> lock(mutex);
  auto next = hosts.lower_bound(base);
  bool overlaps = next != hosts.end() && next->first < base + size;
  if (!overlaps && next != hosts.begin()) overlaps = (--next)->second.base + next->second.size > base;
  if (overlaps) return fail(BAD_PARAMETER, "host register: %p+%zu is registered already", (void *)base, size);
  hosts[base] = Host{base, size, owned, pinned, mapped, mapped ? reserve(round_up(size, PAGE), PROT_NONE) : nullptr};
  if (!owned) count("registered_bytes", (long)size);
  return OK;
}

// What drivers and machines refuse.
aclError check_registration(size_t size) {
  if (setting("register_refused")) return fail(DRIVER_ERROR, "host register: refused");
  long limit = setting("register_limit");
  if (!limit) return OK;
  size_t before = 0;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto &entry : hosts) before += entry.second.owned ? 0 : entry.second.size;
  if (before + size > (size_t)limit) return fail(OUT_OF_MEMORY, "host register: %zu bytes beside %zu", size, before);
  return OK;
}
}  // namespace

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

char *reserve(size_t size, int protection) {
  void *found = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : (char *)found;
}

bool on_device(const void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  return find(regions, address) != nullptr;
}

bool copy_now(const Copy &copy, bool must_be_pinned) {
  std::lock_guard<std::mutex> lock(mutex);
  if (copy.to == DEVICE && !device_holds(copy.target, copy.size)) return false;
  if (copy.from == DEVICE && !device_holds(copy.source, copy.size)) return false;
  const void *host = copy.to == HOST ? copy.target : copy.source;
  if (must_be_pinned && copy.to != copy.from && !is_pinned(host, copy.size)) return false;
  const char *source = copy.source;
  std::vector<char> between;
  if (copy.from == DEVICE) {
    between.resize(copy.size);
    walk(source, copy.size, [&](char *at, size_t done, size_t n) { memcpy(between.data() + done, at, n); });
    source = between.data();
  }
  if (copy.to == DEVICE)
    walk(copy.target, copy.size, [&](char *at, size_t done, size_t n) { memcpy(at, source + done, n); });
  else
    memmove(copy.target, source, copy.size);
  return true;
}

bool holds(const Copy &copy) {
  std::lock_guard<std::mutex> lock(mutex);
  return (copy.to == HOST || device_holds(copy.target, copy.size)) &&
         (copy.from == HOST || device_holds(copy.source, copy.size));
}

bool all_pinned(const std::vector<Copy> &copies) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto &copy : copies)
    if (copy.to != copy.from && !is_pinned(copy.to == HOST ? copy.target : copy.source, copy.size)) return false;
  return true;
}
}  // namespace rig

using namespace rig;

extern "C" {
aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy) {
  NEED_CONTEXT();
  return allocate(address, size);
}

aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy) {
  NEED_CONTEXT();
  return allocate(address, size);
}

aclError aclrtFree(void *address) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  auto found = regions.find((char *)address);
  if (found == regions.end()) return fail(BAD_PARAMETER, "aclrtFree: %p is no device allocation", address);
  used -= found->second.size;
  munmap(found->second.shadow, round_up(found->second.size, PAGE));
  regions.erase(found);  // the address stays PROT_NONE and is never given out again
  return OK;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  *total_bytes = total(), *free_bytes = total() - used;
  return OK;
}

// Virtual memory, which torch_npu's expandable segments use.
aclError aclrtReserveMemAddress(void **address, size_t size, size_t, void *, uint64_t) {
  char *base = reserve(size + GRANULE, PROT_NONE);
  if (!base) return OUT_OF_MEMORY;
  base = (char *)round_up((size_t)base, GRANULE);
  std::lock_guard<std::mutex> lock(rig::mutex);
  reserved[base] = size, *address = base;
  return OK;
}

aclError aclrtReleaseMemAddress(void *address) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  return reserved.erase((char *)address) ? OK : BAD_PARAMETER;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *, uint64_t) {
  {
    std::lock_guard<std::mutex> lock(rig::mutex);
    if (used + size > total()) return OUT_OF_MEMORY;
    used += size;
  }
  *handle = (aclrtDrvMemHandle) new Physical{size, reserve(round_up(size, PAGE), PROT_READ | PROT_WRITE)};
  return OK;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto *physical = (Physical *)handle;
  std::lock_guard<std::mutex> lock(rig::mutex);
  used -= physical->size;
  munmap(physical->shadow, round_up(physical->size, PAGE));
  delete physical;
  return OK;
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  regions[(char *)address] = Region{(char *)address, size, ((Physical *)handle)->shadow + offset};
  return OK;
}

aclError aclrtUnmapMem(void *address) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  return regions.erase((char *)address) ? OK : BAD_PARAMETER;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *, aclrtMemGranularityOptions, size_t *bytes) {
  *bytes = GRANULE;
  return OK;
}

aclError aclrtMemGetAddressRange(void *address, void **base, size_t *size) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  auto *region = find(regions, address);
  if (!region) return BAD_PARAMETER;
  if (base) *base = region->base;
  if (size) *size = region->size;
  return OK;
}

aclError aclrtMemset(void *address, size_t room, int32_t value, size_t size) {
  NEED_CONTEXT();
  if (size > room) return fail(BAD_PARAMETER, "aclrtMemset: %zu bytes into %zu", size, room);
  std::lock_guard<std::mutex> lock(rig::mutex);
  if (!find(regions, address)) return memset(address, value, size), OK;
  bool whole = walk(address, size, [&](char *at, size_t, size_t n) { memset(at, value, n); });
  return whole ? OK : fail(BAD_PARAMETER, "aclrtMemset: beyond device memory");
}

aclError aclrtMallocHost(void **address, size_t size) {
  NEED_CONTEXT();
  if (!address || !size) return fail(BAD_PARAMETER, "aclrtMallocHost: bad argument");
  char *base = reserve(round_up(size, PAGE), PROT_READ | PROT_WRITE);
  if (!base) return OUT_OF_MEMORY;
  *address = base;
  return add_host(base, size, true, true, false);
}

aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *) {
  return aclrtMallocHost(address, size);
}

aclError aclrtFreeHost(void *address) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  auto found = hosts.find((char *)address);
  if (found == hosts.end() || !found->second.owned)
    return fail(BAD_PARAMETER, "aclrtFreeHost: %p is not of aclrtMallocHost", address);
  munmap(address, round_up(found->second.size, PAGE));
  hosts.erase(found);
  return OK;
}

aclError aclrtHostRegister(void *address, uint64_t size, aclrtHostRegisterType type, void **alias) {
  NEED_CONTEXT();
  if (!address || !size || !alias || type != ACL_HOST_REGISTER_MAPPED)
    return fail(BAD_PARAMETER, "aclrtHostRegister(%p, %zu): bad argument", address, (size_t)size);
  if (aclError error = check_registration(size)) return error;
  if (aclError error = add_host((char *)address, size, false, false, true)) return error;
  std::lock_guard<std::mutex> lock(rig::mutex);
  *alias = hosts[(char *)address].alias;
  return OK;
}

aclError aclrtHostRegisterV2(void *address, uint64_t size, uint32_t flags) {
  NEED_CONTEXT();
  const uint32_t all = ACL_HOST_REG_MAPPED | ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY | ACL_HOST_REG_PINNED;
  if (!address || !size || (flags & ~all) || !(flags & (ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED)))
    return fail(BAD_PARAMETER, "aclrtHostRegisterV2(%p, %zu, 0x%x): bad argument", address, (size_t)size, flags);
  unsigned char residency[1];
  if (mincore((void *)((size_t)address & ~(PAGE - 1)), 1, residency))
    return fail(BAD_PARAMETER, "aclrtHostRegisterV2: %p is not mapped in this process", address);
  if ((flags & ACL_HOST_REG_MAPPED) && setting("mapped_refused"))
    return fail(NOT_SUPPORTED, "aclrtHostRegisterV2: no mapping on this device");
  if (aclError error = check_registration(size)) return error;
  return add_host((char *)address, size, false, flags & ACL_HOST_REG_PINNED, flags & ACL_HOST_REG_MAPPED);
}

aclError aclrtHostGetDevicePointer(void *address, void **alias, uint32_t flags) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  auto *host = find(hosts, address);
  if (flags || !host || !host->mapped) return fail(BAD_PARAMETER, "aclrtHostGetDevicePointer: %p not mapped", address);
  *alias = host->alias + ((char *)address - host->base);
  return OK;
}

aclError aclrtHostUnregister(void *address) {  // even of a device that is gone, or the range stays taken
  if (device < 0) return fail(NO_CONTEXT, "aclrtHostUnregister: aclrtSetDevice was not called in this thread");
  std::lock_guard<std::mutex> lock(rig::mutex);
  auto found = hosts.find((char *)address);
  if (found == hosts.end() || found->second.owned)
    return fail(BAD_PARAMETER, "aclrtHostUnregister: nothing is registered at %p", address);
  count("registered_bytes", -(long)found->second.size);
  hosts.erase(found);
  return OK;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *found) {
  std::lock_guard<std::mutex> lock(rig::mutex);
  memset(found, 0, sizeof *found);
  found->pageSize = PAGE;
  found->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  if (find(hosts, address)) found->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  if (find(regions, address)) {
    found->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    found->location.id = (uint32_t)setting("location");
  }
  return OK;
}
}
