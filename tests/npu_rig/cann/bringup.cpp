// The rest of what torch_npu asks for when it starts, answered so that it goes on.
#include "rig.hpp"

using namespace rig;

namespace {
bool initialised = false;
int context;
}  // namespace

extern "C" {
aclError aclInit(const char *) {
  if (initialised) return 100002;
  initialised = true;
  return OK;
}
aclError aclFinalize() {
  initialised = false;
  return OK;
}
const char *aclrtGetSocName() {
  const char *name = getenv("FAKE_ACL_SOC");
  return name ? name : "Ascend910B1";
}
void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *found) {
  memset(found, 0, sizeof *found);
  snprintf(found->version, sizeof found->version, "9.1.0");
  return OK;
}

aclError aclrtGetDeviceCount(uint32_t *many) {
  *many = 1;
  return OK;
}
aclError aclrtSetDevice(int32_t number) {
  if (number) return fail(BAD_DEVICE, "aclrtSetDevice(%d): there is one device", number);
  device = 0;
  return OK;
}
aclError aclrtGetDevice(int32_t *number) {
  NEED_CONTEXT();
  *number = device;
  return OK;
}
aclError aclrtResetDevice(int32_t) {
  device = -1;
  return OK;
}
aclError aclrtGetCurrentContext(aclrtContext *found) {
  if (device < 0) return NO_CONTEXT;
  *found = &context;
  return OK;
}
aclError aclrtSetCurrentContext(aclrtContext wanted) {
  if (wanted != &context) return fail(NO_CONTEXT, "aclrtSetCurrentContext: no such context");
  device = 0;
  return OK;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return OK;
}
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 0;
  return OK;
}
aclError aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = (int32_t)getpid();
  return OK;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
  *logical = user;
  return OK;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value) {
  *value = 24;
  return OK;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t *value) {
  *value = 24;
  return OK;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t *value) {
  *value = 24;
  return OK;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
  *value = 24;
  return OK;
}
aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model) *model = nullptr;
  return OK;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  static thread_local aclmdlRICaptureMode now = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, now);
  return OK;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return OK; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return OK; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return OK; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return OK; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t *actual) {
  if (actual) *actual = wanted;
  return OK;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return OK; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return OK; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return OK; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value) {
  *value = 0;
  return OK;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return OK; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t *flag) {
  *flag = 0;
  return OK;
}
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return OK; }
aclError aclrtSetExceptionInfoCallback(aclrtExceptionInfoCallback) { return OK; }
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return OK; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return OK; }
aclError aclSetCompileopt(aclCompileOpt, const char *) { return OK; }
aclError aclopSetCompileFlag(aclOpCompileFlag) { return OK; }
}
