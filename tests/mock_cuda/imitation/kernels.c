/* Launches of the kernels inside torch's own libraries: they do nothing, but their arguments are looked at.

   The number and sizes of the arguments are in compressed cubins, out of reach; their types are in the mangled
   name that the library registers. So those whose type begins with, or is made of, pointers are checked, and no others. */
#include "imitation.h"
#include "driver_types.h"
#include "vector_types.h"
#include <dlfcn.h>
#include <pthread.h>

typedef cudaError_t E;
#define MOST_POINTERS 32

typedef struct {
  const void *function; /* the host's stub: the key */
  const char *name;     /* mangled */
  char *shown;          /* demangled; set with the rest at the first launch */
  int count;
  struct { short argument, at; } pointers[MOST_POINTERS]; /* at: which 8 bytes of the argument */
} kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kernel **table; /* open addressing */
static size_t room, filled;

static size_t slot_of(const void *function) {
  size_t i = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15u % room;
  while (table[i] && table[i]->function != function) i = (i + 1) % room;
  return i;
}

void __cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e) {
  pthread_mutex_lock(&lock);
  if (2 * filled >= room) {
    kernel **old = table;
    size_t before = room;
    table = calloc(room = room ? 4 * room : 1 << 16, sizeof *table);
    for (size_t i = 0; i < before; i++)
      if (old[i]) table[slot_of(old[i]->function)] = old[i];
    free(old);
  }
  size_t i = slot_of(function);
  if (!table[i]) {
    table[i] = calloc(1, sizeof **table);
    table[i]->function = function;
    table[i]->name = name;
    filled++;
  }
  pthread_mutex_unlock(&lock);
}

static int begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

static void add(kernel *k, int argument, int at) {
  if (k->count < MOST_POINTERS) {
    k->pointers[k->count].argument = argument;
    k->pointers[k->count++].at = at;
  }
}

/* One parameter's type, as demangled. */
static void note(kernel *k, int argument, char *type) {
  while (*type == ' ') type++;
  size_t n = strlen(type);
  static const char *const tails[] = {" const", " __restrict__", " __restrict", " volatile"};
  for (int again = 1; again;) {
    again = 0;
    for (int i = 0; i < 4; i++) {
      size_t t = strlen(tails[i]);
      if (n > t && strcmp(type + n - t, tails[i]) == 0) type[n -= t] = 0, again = 1;
    }
  }
  if (n && type[n - 1] == '*') add(k, argument, 0);
  else if (begins(type, "std::array<char*, "))
    for (int i = 0, most = atoi(type + strlen("std::array<char*, ")); i < most; i++) add(k, argument, i);
  else if (begins(type, "at::cuda::detail::TensorInfo<") || begins(type, "at::GenericPackedTensorAccessor<"))
    add(k, argument, 0);
}

/* The parameters are what the last parentheses hold: split it at its own commas. */
static void parse(kernel *k) {
  /* Python loads torch's libraries for themselves, so theirs are not among the default ones. */
  void *cxx = dlopen("libstdc++.so.6", RTLD_LAZY);
  char *(*demangle)(const char *, char *, size_t *, int *) = cxx ? dlsym(cxx, "__cxa_demangle") : NULL;
  int status = -1;
  char *text = demangle ? demangle(k->name, NULL, NULL, &status) : NULL;
  k->shown = strdup(text && !status ? text : k->name);
  if (!text || status || !*text || text[strlen(text) - 1] != ')') return;
  char *end = text + strlen(text) - 1, *open = end;
  for (int depth = 0; open > text; open--) {
    if (*open == ')') depth++;
    if (*open == '(' && --depth == 0) break;
  }
  int depth = 0, argument = 0;
  char *start = open + 1;
  for (char *p = open + 1; p <= end; p++) {
    if (strchr("<({[", *p)) depth++;
    if (p < end && strchr(">)}]", *p)) depth--;
    if (p == end || (*p == ',' && depth == 0)) {
      *p = 0;
      note(k, argument++, start);
      start = p + 1;
    }
  }
}

static void check(const void *function, void **arguments) {
  pthread_mutex_lock(&lock);
  kernel *k = room ? table[slot_of(function)] : NULL;
  if (k && !k->shown) parse(k);
  pthread_mutex_unlock(&lock);
  if (!k || !arguments) return;
  for (int i = 0; i < k->count; i++) {
    void *value;
    memcpy(&value, (char *)arguments[k->pointers[i].argument] + 8 * k->pointers[i].at, 8);
    kernel_pointer(k->shown, k->pointers[i].argument, value, current_device());
  }
}

static E launch(const void *function, dim3 grid, dim3 block, void **arguments) {
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || block.x * block.y * block.z > 1024 ||
      grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  check(function, arguments);
  return 0;
}

E cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(f, grid, block, arguments);
}
E __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch((const void *)k, grid, block, arguments);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) {
  return launch(f, c->gridDim, c->blockDim, arguments);
}

/* `<<<grid, block>>>` leaves them here for the stub that the compiler made. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (grid) *grid = configuration.grid;
  if (block) *block = configuration.block;
  if (shared) *shared = configuration.shared;
  if (stream) *(void **)stream = configuration.stream;
  return 0;
}
void **__cudaRegisterFatBinary(void *f) { return token(); }
E __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
E cudaLibraryLoadData(void **l) { *l = token(); return 0; }
E cudaLibraryGetKernel(void **k) { *k = token(); return 0; }
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = compute_capability();
  return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) {
  *n = 2;
  return 0;
}
