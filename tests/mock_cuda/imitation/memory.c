/* Device memory that the host cannot touch, pinned memory, and poison.

   A range of addresses is reserved for each device, without rights: host code that follows a device pointer gets
   SIGSEGV. The same range lies a second time, SHIFT above, where an allocation's pages can be read and written;
   only the imitation's own copies go there. Fresh pages are private copies of one page of poison, so that they
   cost nothing before they are written. Addresses are never used twice: a freed one stays wrong. */
#include "imitation.h"
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define CHUNK ((size_t)2 << 20)         /* bytes of the file of poison */
#define PER_DEVICE ((size_t)1 << 40)    /* addresses of one device */
#define MOST_DEVICES 16
#define SHIFT (PER_DEVICE * MOST_DEVICES)

typedef struct {
  uintptr_t start;
  size_t bytes;
  int live;
} block;

/* One stretch of addresses, handed out from the bottom; `blocks` is in the order of addresses. */
typedef struct {
  uintptr_t base, next;
  block *blocks;
  size_t count, room, dead, used;
} arena;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static arena arenas[MOST_DEVICES + 1]; /* the last one is pinned host memory */
static arena *const pinned = &arenas[MOST_DEVICES];
static int poison_file;

long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

void refuse(const char *call, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "mock-cuda refuses %s: ", call);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  abort();
}

static uintptr_t reserve(size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) refuse("startup", "cannot reserve %zu bytes of addresses", bytes);
  return (uintptr_t)at;
}

static void start(void) {
  uintptr_t base = reserve(2 * SHIFT);
  for (int d = 0; d < MOST_DEVICES; d++) arenas[d].base = arenas[d].next = base + d * PER_DEVICE;
  pinned->base = pinned->next = reserve(PER_DEVICE);
  poison_file = memfd_create("poison", MFD_CLOEXEC);
  char *page = malloc(CHUNK);
  memset(page, (int)setting("MOCK_POISON", 255), CHUNK);
  if (poison_file < 0 || write(poison_file, page, CHUNK) != (ssize_t)CHUNK)
    refuse("startup", "cannot make the file of poison");
  free(page);
}

static size_t rounded(size_t bytes) { return bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE; }

static void map_poison(uintptr_t at, size_t bytes) {
  for (size_t done = 0; done < bytes; done += CHUNK) {
    size_t part = bytes - done < CHUNK ? bytes - done : CHUNK;
    if (mmap((void *)(at + done), part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison_file, 0) ==
        MAP_FAILED)
      refuse("an allocation", "out of mappings: /proc/sys/vm/max_map_count");
  }
}

static void unmap(uintptr_t at, size_t bytes) {
  mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

/* Dead blocks go when they are the most; what is not found is dead too. */
static void tidy(arena *a) {
  if (a->dead < 4096 || 2 * a->dead < a->count) return;
  size_t kept = 0;
  for (size_t i = 0; i < a->count; i++)
    if (a->blocks[i].live) a->blocks[kept++] = a->blocks[i];
  a->count = kept;
  a->dead = 0;
}

/* The last block that begins at or below the address. */
static block *find(arena *a, uintptr_t address) {
  size_t low = 0, high = a->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (a->blocks[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low ? &a->blocks[low - 1] : NULL;
}

static int take(arena *a, uintptr_t shift, void **address, size_t bytes, size_t most) {
  pthread_once(&once, start);
  pthread_mutex_lock(&lock);
  size_t length = rounded(bytes);
  if (a->used + length > most) {
    pthread_mutex_unlock(&lock);
    return 2;
  }
  if (a->next + length + PAGE > a->base + PER_DEVICE) refuse("an allocation", "the addresses of a device are used up");
  tidy(a);
  if (a->count == a->room) a->blocks = realloc(a->blocks, (a->room = a->room ? 2 * a->room : 1024) * sizeof(block));
  /* An allocation ends at a page nobody owns. */
  a->blocks[a->count++] = (block){a->next, bytes, 1};
  map_poison(a->next + shift, length);
  *address = (void *)a->next;
  a->next += length + PAGE;
  a->used += length;
  pthread_mutex_unlock(&lock);
  return 0;
}

static int give(arena *a, uintptr_t shift, void *address) {
  if (!address) return 0;
  pthread_mutex_lock(&lock);
  block *b = find(a, (uintptr_t)address);
  int wrong = !b || b->start != (uintptr_t)address || !b->live;
  if (!wrong) {
    b->live = 0;
    a->dead++;
    a->used -= rounded(b->bytes);
    unmap(b->start + shift, rounded(b->bytes));
  }
  pthread_mutex_unlock(&lock);
  return wrong;
}

size_t total_bytes(void) { return (size_t)80 << 30; }
size_t free_bytes(int device) { return total_bytes() - ((size_t)1 << 30) - arenas[device].used; }
int allocate(void **address, size_t bytes, int device) {
  return take(&arenas[device], SHIFT, address, bytes, total_bytes() - ((size_t)1 << 30));
}
int release(void *address) {
  int device = device_of(address);
  return address ? device < 0 ? 1 : give(&arenas[device], SHIFT, address) : 0;
}
int allocate_pinned(void **address, size_t bytes) { return take(pinned, 0, address, bytes, PER_DEVICE); }
int release_pinned(void *address) { return give(pinned, 0, address); }

int device_of(const void *address) {
  pthread_once(&once, start);
  uintptr_t at = (uintptr_t)address - arenas[0].base;
  return at < SHIFT ? (int)(at / PER_DEVICE) : -1;
}

enum place place_of(const void *address) {
  if (device_of(address) >= 0) return DEVICE;
  return (uintptr_t)address - pinned->base < PER_DEVICE ? PINNED : HOST;
}

/* The block around the address, copied out; zero bytes are allowed at its very end. */
static int living(const void *address, size_t bytes, block *out) {
  int device = device_of(address);
  pthread_mutex_lock(&lock);
  block *b = find(device < 0 ? pinned : &arenas[device], (uintptr_t)address);
  int found = b && b->live && (uintptr_t)address + bytes <= b->start + b->bytes;
  if (b) *out = *b;
  else *out = (block){0, 0, 0};
  pthread_mutex_unlock(&lock);
  return found;
}

static void require_living(const char *call, const char *what, const void *address, size_t bytes) {
  block b;
  if (living(address, bytes, &b)) return;
  if (b.start && b.live && (uintptr_t)address < b.start + b.bytes)
    refuse(call, "%s: %zu bytes at offset %zu of an allocation of %zu", what, bytes, (uintptr_t)address - b.start, b.bytes);
  refuse(call, "%s: %p is device or pinned memory that is freed or was never allocated", what, address);
}

void *usable(const char *call, const char *what, const void *address, size_t bytes) {
  enum place place = place_of(address);
  if (place == HOST || !bytes) return (void *)address;
  require_living(call, what, address, bytes);
  return (void *)((uintptr_t)address + (place == DEVICE ? SHIFT : 0));
}

void *on_device(const char *call, const char *what, const void *address, size_t bytes, int device) {
  if (!bytes) return NULL;
  if (!address) refuse(call, "%s is NULL, where %zu bytes are used", what, bytes);
  if (place_of(address) == HOST) refuse(call, "%s is a host pointer (%p)", what, address);
  if (place_of(address) == DEVICE && device_of(address) != device)
    refuse(call, "%s is on device %d, the call on device %d", what, device_of(address), device);
  return usable(call, what, address, bytes);
}

void kernel_pointer(const char *kernel, int argument, const void *address, int device) {
  char what[32];
  if (!address) return;
  snprintf(what, sizeof what, "argument %d", argument);
  on_device(kernel, what, address, 1, device);
}

int is_mapped(const void *address) {
  unsigned char seen;
  void *page = (void *)((uintptr_t)address / PAGE * PAGE);
  return mincore(page, PAGE, &seen) == 0;
}

void poison(void *usable_address, size_t bytes) {
  if (bytes) memset(usable_address, (int)setting("MOCK_POISON", 255), bytes);
}
