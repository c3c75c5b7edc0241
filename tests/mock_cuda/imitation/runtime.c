/* libcudart: devices, memory, copies, streams, events. Copies are done, at once; streams and events only exist. */
#include "imitation.h"
#include "driver_types.h"
#include <dlfcn.h>

typedef cudaError_t E;
static __thread int device_ = 0;

int device_count(void) { return (int)setting("MOCK_GPUS", 8); }
int compute_capability(void) { return (int)setting("MOCK_CC", 90); }
int current_device(void) { return device_; }
void *token(void) { return calloc(1, 64); }

/* devices */
E cudaGetDeviceCount(int *n) { *n = device_count(); return 0; }
E cudaGetDevice(int *d) { *d = device_; return 0; }
E cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) return cudaErrorInvalidDevice;
  device_ = d;
  return 0;
}
E cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
E cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch ((int)a) {
  case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
  case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
  case cudaDevAttrWarpSize: *v = 32; break;
  case cudaDevAttrMultiProcessorCount: *v = compute_capability() >= 90 ? 132 : 108; break;
  case cudaDevAttrL2CacheSize: *v = 50 << 20; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
  case cudaDevAttrComputeCapabilityMajor: *v = compute_capability() / 10; break;
  case cudaDevAttrComputeCapabilityMinor: *v = compute_capability() % 10; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = compute_capability() >= 90 ? 233472 : 167936; break;
  case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = compute_capability() >= 90 ? 232448 : 166912; break;
  case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
  default: *v = 1;
  }
  return 0;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "NVIDIA %s (mock)", compute_capability() >= 90 ? "H100 80GB HBM3" : "A100-SXM4-80GB");
  memset(&p->uuid, d + 1, 16);
  p->pciBusID = d + 1;
  p->totalGlobalMem = total_bytes();
  p->major = compute_capability() / 10;
  p->minor = compute_capability() % 10;
  cudaDeviceGetAttribute(&p->multiProcessorCount, cudaDevAttrMultiProcessorCount, d);
  int shared;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, d);
  p->sharedMemPerMultiprocessor = shared;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, d);
  p->sharedMemPerBlockOptin = shared;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryBusWidth = 5120;
  p->asyncEngineCount = 3;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->managedMemory = p->cooperativeLaunch = 1;
  return 0;
}
E cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
E cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return 0; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
const char *cudaGetErrorString(E e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "mock-cuda says no" : "no error";
}
const char *cudaGetErrorName(E e) { return e ? "mockError" : "cudaSuccess"; }
/* What the caller looks for is in this library too, if it is imitated at all. */
E cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned v, unsigned long long f,
                                   enum cudaDriverEntryPointQueryResult *r) {
  *p = dlsym(RTLD_DEFAULT, name);
  if (r) *r = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return 0;
}

/* streams and events */
E cudaStreamCreate(cudaStream_t *s) { *s = token(); return 0; }
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = token(); return 0; }
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = token(); return 0; }
E cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = 0; return 0; }
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, void *a, void *b, void *d, void *e, void *f) {
  *c = 0;
  return 0;
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
E cudaEventCreate(cudaEvent_t *e) { *e = token(); return 0; }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = token(); return 0; }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.05f; return 0; }

/* memory */
E cudaMalloc(void **p, size_t n) { return allocate(p, n, device_); }
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return allocate(p, n, device_); }
E cudaFree(void *p) {
  if (release(p)) refuse("cudaFree", "%p is no allocation", p);
  return 0;
}
E cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
E cudaHostAlloc(void **p, size_t n, unsigned f) { return allocate_pinned(p, n); }
E cudaFreeHost(void *p) {
  if (release_pinned(p)) refuse("cudaFreeHost", "%p is no pinned allocation", p);
  return 0;
}
E cudaMemGetInfo(size_t *f, size_t *t) {
  *f = free_bytes(device_);
  *t = total_bytes();
  return 0;
}
E cudaDeviceGetDefaultMemPool(void **p, int d) { *p = token(); return 0; }
E cudaMemPoolGetAttribute(void *p, int a, void *v) { *(uint64_t *)v = 0; return 0; }
/* A __constant__ or __device__ variable: some fresh device memory. */
E cudaGetSymbolAddress(void **p, const void *s) { return allocate(p, 65536, device_); }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  enum place place = place_of(p);
  memset(a, 0, sizeof *a);
  a->type = place == DEVICE ? cudaMemoryTypeDevice : place == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = place == DEVICE ? device_of(p) : place == PINNED ? 0 : -2;
  if (place != HOST) a->devicePointer = (void *)p;
  if (place != DEVICE) a->hostPointer = (void *)p;
  return 0;
}

/* copies */
static void check_side(const char *call, const char *what, const void *p, int must_be_device) {
  if (must_be_device && place_of(p) == HOST) refuse(call, "%s is a host pointer (%p)", what, p);
  if (!must_be_device && place_of(p) == DEVICE) refuse(call, "%s is a device pointer (%p)", what, p);
}
static E copy(const char *call, void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
  if (!n) return 0;
  if (kind != cudaMemcpyDefault) {
    check_side(call, "the destination", to, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    check_side(call, "the source", from, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  }
  memmove(usable(call, "the destination", to, n), usable(call, "the source", from, n), n);
  return 0;
}
E cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { return copy("cudaMemcpy", d, s, n, k); }
E cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) {
  return copy("cudaMemcpyAsync", d, s, n, k);
}
E cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t t) {
  return copy("cudaMemcpyPeerAsync", d, s, n, cudaMemcpyDeviceToDevice);
}
E cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t t) {
  for (size_t row = 0; row < h; row++) copy("cudaMemcpy2DAsync", (char *)d + row * dp, (const char *)s + row * sp, w, k);
  return 0;
}
static E fill(const char *call, void *p, int v, size_t n) {
  if (n) memset(on_device(call, "the destination", p, n, device_of(p)), v, n);
  return 0;
}
E cudaMemset(void *d, int v, size_t n) { return fill("cudaMemset", d, v, n); }
E cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t) { return fill("cudaMemsetAsync", d, v, n); }
