/* libcuda: what Triton, Inductor's launcher and NVRTC call. The parameters of each launch are checked by the sizes in the cubin. */
#include "imitation.h"

/* Numbers of CUDA 13's headers. */
enum {
  CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0, CU_FUNC_ATTRIBUTE_NUM_REGS = 4, CU_MEMORYTYPE_DEVICE = 0,
  CU_MEMORYTYPE_HOST = 0, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9, CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
};

enum { OK = 0, INVALID = 1, NOT_FOUND = 500, MOST = 256 };

typedef struct { const void *image; } module;
typedef struct {
  char *name;
  int count; /* -1: not known */
  int sizes[MOST];
} function;

int cuInit(unsigned f) { return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuDeviceGetCount(int *n) { *n = device_count(); return OK; }
int cuDeviceGet(int *d, int i) { *d = i; return OK; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  extern int cudaDeviceGetAttribute(int *, int, int);
  return cudaDeviceGetAttribute(v, a, d); /* the numbers are the same */
}
static char contexts[64];
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return OK; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &contexts[d]; return OK; }
int cuCtxGetCurrent(void **c) { *c = &contexts[current_device()]; return OK; }
int cuCtxSetCurrent(void *c) {
  extern int cudaSetDevice(int);
  return c ? cudaSetDevice((int)((char *)c - contexts)) : OK;
}
int cuCtxGetDevice(int *d) { *d = current_device(); return OK; }
int cuCtxGetLimit(size_t *v, int l) { *v = 1 << 20; return OK; }
int cuGetErrorString(int e, const char **s) { *s = e == INVALID ? "invalid argument" : e ? "mock-cuda says no" : "no error"; return OK; }

/* Modules live as long as the process, and keep a copy of what they were loaded from. */
static const void *copy_of(const void *image) {
  if (memcmp(image, "\x7f" "ELF", 4) != 0) return NULL;
  const uint64_t *header = image; /* the section table is a cubin's last part, or its program headers are */
  const uint16_t *small = image;
  size_t sections = header[5] + (size_t)small[29] * small[30], programs = header[4] + (size_t)small[27] * small[28];
  size_t bytes = sections > programs ? sections : programs;
  return memcpy(malloc(bytes), image, bytes);
}
static int load(void **m, const void *image) {
  module *made = token();
  made->image = copy_of(image);
  *m = made;
  return OK;
}
int cuModuleLoadData(void **m, const void *image) { return load(m, image); }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void *v) { return load(m, image); }
int cuModuleLoad(void **m, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return NOT_FOUND;
  fseek(file, 0, SEEK_END);
  long bytes = ftell(file);
  rewind(file);
  char *image = calloc(1, bytes + 64);
  if (fread(image, 1, bytes, file) != (size_t)bytes) refuse("cuModuleLoad", "cannot read %s", path);
  fclose(file);
  int result = load(m, image);
  free(image);
  return result;
}
int cuModuleGetFunction(void **f, void *m, const char *name) {
  function *made = calloc(1, sizeof *made);
  made->name = strdup(name);
  made->count = parameter_sizes(((module *)m)->image, name, made->sizes, MOST);
  /* Only PTX, which a real driver compiles, may go without; a cubin must have what is asked of it. */
  if (made->count < 0 && ((module *)m)->image) return NOT_FOUND;
  *f = made;
  return OK;
}
int cuFuncGetAttribute(int *v, int a, void *f) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return OK;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 2; return OK; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 2; return OK; }

/* Which 8 bytes are a pointer is not written down: what looks like an address of this process is one. */
static void check(const function *f, void **parameters) {
  for (int i = 0; parameters && i < f->count; i++) {
    void *value;
    if (f->sizes[i] != 8) continue;
    memcpy(&value, parameters[i], 8);
    if (place_of(value) != HOST) kernel_pointer(f->name, i, value, current_device());
    else if ((uintptr_t)value > 65535 && is_mapped(value))
      refuse(f->name, "parameter %d is a host pointer (%p)", i, value);
  }
}
static int launch(void *f, const unsigned *grid, const unsigned *block, void **parameters) {
  if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2] || grid[1] > 65535 || grid[2] > 65535 ||
      block[0] * block[1] * block[2] > 1024)
    return INVALID;
  check(f, parameters);
  return OK;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  return launch(f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, parameters);
}
/* A configuration begins with the grid's three sizes and the block's. */
int cuLaunchKernelEx(const unsigned *c, void *f, void **parameters, void **extra) {
  return launch(f, c, c + 3, parameters);
}

/* Triton asks before it launches: a pointer that is not the device's is an error there. */
int cuPointerGetAttribute(void *v, int a, uintptr_t p) {
  if (place_of((void *)p) == HOST) return INVALID;
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)v = device_of((void *)p);
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)v = place_of((void *)p) == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(uintptr_t *)v = p;
  else *(uint64_t *)v = 0;
  return OK;
}
int cuMemAlloc_v2(uintptr_t *p, size_t n) { return allocate((void **)p, n, current_device()); }
int cuMemFree_v2(uintptr_t p) { return release((void *)p); }
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t n, void *stream) {
  memcpy(to, usable("cuMemcpyDtoHAsync", "the source", (void *)from, n), n);
  return OK;
}
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t n, void *stream) {
  memcpy(on_device("cuMemcpyHtoDAsync", "the destination", (void *)to, n, current_device()), from, n);
  return OK;
}
