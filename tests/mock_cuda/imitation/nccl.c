/* NCCL: every call is checked, logged as a line of JSON, and moves what this rank alone can move. What would come from
   another rank is poison. tests/cuda_logs reads the logs of all ranks. */
#include "imitation.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct { char bytes[128]; } unique_id;
typedef struct {
  char id[240];  /* the same on all ranks of the communicator */
  int size;      /* 0: not known, after a split without MOCK_LOG */
  int rank, device, splits;
} communicator;

static const char *const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *const ops[] = {"sum", "prod", "max", "min", "avg"};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static int file_of; /* the process that opened it: a forked one opens its own */

/* One line of this process's log, in one write: nothing comes between its bytes. With MOCK_LOG unset there is none. */
void log_line(const char *format, ...) {
  const char *prefix = getenv("MOCK_LOG");
  if (!prefix) return;
  char line[1024], name[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  if (length < 0 || length >= (int)sizeof line - 1) refuse("MOCK_LOG", "a line of %d bytes", length);
  line[length++] = '\n';
  pthread_mutex_lock(&lock);
  snprintf(name, sizeof name, "%s.%d", prefix, getpid());
  if (file < 0 || file_of != getpid()) {
    file = open(name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    file_of = getpid();
  }
  if (file < 0 || write(file, line, length) != length) refuse("MOCK_LOG", "cannot write %s: %s", name, strerror(errno));
  pthread_mutex_unlock(&lock);
}

static const char *op_name(int op) { return op >= 0 && op < 5 ? ops[op] : "own"; }

/* communicators */
static int made(communicator **out, const char *id, int size, int rank) {
  communicator *c = calloc(1, sizeof *c);
  snprintf(c->id, sizeof c->id, "%s", id);
  c->size = size;
  c->rank = rank;
  c->device = current_device();
  *out = c;
  return 0;
}
static int initialised(communicator **out, int size, const unique_id *u, int rank) {
  char id[33];
  for (int i = 0; i < 16; i++) snprintf(id + 2 * i, 3, "%02x", (unsigned char)u->bytes[i]);
  log_line("{\"call\": \"init\", \"comm\": \"%s\", \"size\": %d, \"rank\": %d, \"device\": %d}", id, size, rank, current_device());
  return made(out, id, size, rank);
}
int ncclGetVersion(int *v) { *v = 22907; return 0; }
int ncclGetUniqueId(unique_id *u) {
  static int counter;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  uint32_t words[4] = {(uint32_t)getpid(), (uint32_t)__sync_add_and_fetch(&counter, 1), (uint32_t)now.tv_sec, (uint32_t)now.tv_nsec};
  memset(u, 7, sizeof *u);
  memcpy(u, words, sizeof words);
  return 0;
}
int ncclCommInitRank(communicator **c, int n, unique_id u, int rank) { return initialised(c, n, &u, rank); }
int ncclCommInitRankConfig(communicator **c, int n, unique_id u, int rank, void *g) { return initialised(c, n, &u, rank); }
int ncclCommInitRankScalable(communicator **c, int n, int rank, int k, unique_id *u, void *g) { return initialised(c, n, u, rank); }
/* How many ranks of `parent` split with this color: each appends its color to a file beside the logs, and reads all.
   Like NCCL's, the call returns when all ranks of the parent have made it. 0: no logs, so no place to meet, or two minutes
   have passed. Its length decides what torch sends: for a communicator of no rank it sends no messages. */
static int ranks_of_color(const communicator *parent, int color) {
  const char *prefix = getenv("MOCK_LOG");
  if (!prefix || !parent->size) return 0;
  char id[240], name[4600], line[32];
  snprintf(id, sizeof id, "%s", parent->id);
  for (char *c = id; *c; c++)
    if (*c == '/' || *c == ':') *c = '_';
  snprintf(name, sizeof name, "%s-split-%s-%d", prefix, id, parent->splits);
  FILE *all = fopen(name, "a");
  if (!all) refuse("ncclCommSplit", "cannot write %s", name);
  fprintf(all, "%d\n", color);
  fclose(all);
  for (int tries = 0; tries < 12000; tries++) {
    int lines = 0, found = 0;
    all = fopen(name, "r");
    while (all && fgets(line, sizeof line, all)) lines++, found += atoi(line) == color;
    if (all) fclose(all);
    if (lines >= parent->size) return found;
    usleep(10000);
  }
  return 0;
}
/* torch passes the rank in the new group as the key. */
int ncclCommSplit(communicator *parent, int color, int key, communicator **out, void *g) {
  char id[240];
  snprintf(id, sizeof id, "%.180s/%d:%d", parent->id, parent->splits, color);
  log_line("{\"call\": \"split\", \"parent\": \"%s\", \"turn\": %d, \"parent_rank\": %d, \"comm\": \"%s\", \"color\": %d, \"key\": %d}",
           parent->id, parent->splits, parent->rank, color < 0 ? "" : id, color, key);
  int size = ranks_of_color(parent, color);
  parent->splits++;
  *out = NULL;
  return color < 0 ? 0 : made(out, id, size, key);
}
int ncclCommCount(communicator *c, int *n) { *n = c->size; return 0; }
int ncclCommUserRank(communicator *c, int *n) { *n = c->rank; return 0; }
int ncclCommGetAsyncError(communicator *c, int *e) { *e = 0; return 0; }
const char *ncclGetErrorString(int e) { return "no error"; }
const char *ncclGetLastError(communicator *c) { return ""; }

/* groups: what is between the outermost pair starts together */
static __thread int depth;
int ncclGroupStart(void) {
  if (depth++ == 0) log_line("{\"call\": \"group_start\", \"thread\": %ld}", (long)syscall(SYS_gettid));
  return 0;
}
int ncclGroupEnd(void) {
  if (--depth == 0) log_line("{\"call\": \"group_end\", \"thread\": %ld}", (long)syscall(SYS_gettid));
  return 0;
}

/* collectives: `sent` and `received` in elements */
typedef struct { const char *name; communicator *comm; int type; void *from, *to; size_t sent, received; } call;

static call checked(const char *name, communicator *c, int type, const void *from, size_t sent, void *to, size_t received) {
  if (!c) refuse(name, "no communicator");
  if (type < 0 || type > 11) refuse(name, "no type has number %d", type);
  if (current_device() != c->device) refuse(name, "the communicator is of device %d, the call on device %d", c->device, current_device());
  return (call){name, c, type,
                on_device(name, "the send buffer", from, sent * widths[type], c->device),
                on_device(name, "the receive buffer", to, received * widths[type], c->device), sent, received};
}
static void logged(const call *k, size_t count, const char *op, int root) {
  log_line("{\"call\": \"%s\", \"comm\": \"%s\", \"rank\": %d, \"count\": %zu, \"dtype\": \"%s\", \"op\": \"%s\", \"root\": %d, \"thread\": %ld}",
           k->name, k->comm->id, k->comm->rank, count, types[k->type], op, root, (long)syscall(SYS_gettid));
}
static void move(const call *k, size_t to_element, size_t from_element, size_t count) {
  size_t w = widths[k->type];
  if (count) memmove((char *)k->to + to_element * w, (char *)k->from + from_element * w, count * w);
}

int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, communicator *c, void *st) {
  call k = checked("all_reduce", c, t, s, n, r, n);
  logged(&k, n, op_name(op), -1);
  if (s != r) move(&k, 0, 0, n);
  return 0;
}
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, communicator *c, void *st) {
  call k = checked("reduce", c, t, s, n, c->rank == root ? r : NULL, c->rank == root ? n : 0);
  logged(&k, n, op_name(op), root);
  if (c->rank == root && s != r) move(&k, 0, 0, n);
  return 0;
}
static int broadcast(const void *s, void *r, size_t n, int t, int root, communicator *c) {
  int mine = c->rank == root;
  call k = checked("broadcast", c, t, mine ? s : NULL, mine ? n : 0, r, n);
  logged(&k, n, "", root);
  if (mine && s != r) move(&k, 0, 0, n);
  if (!mine) poison(k.to, n * widths[t]);
  return 0;
}
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, communicator *c, void *st) { return broadcast(s, r, n, t, root, c); }
int ncclBcast(void *b, size_t n, int t, int root, communicator *c, void *st) { return broadcast(b, b, n, t, root, c); }
int ncclAllGather(const void *s, void *r, size_t n, int t, communicator *c, void *st) {
  call k = checked("all_gather", c, t, s, n, r, n * (c->size ? c->size : 1));
  logged(&k, n, "", -1);
  if ((const char *)s != (char *)r + c->rank * n * widths[t] && (c->size || !c->rank)) move(&k, c->size ? c->rank * n : 0, 0, n);
  return 0;
}
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, communicator *c, void *st) {
  call k = checked("reduce_scatter", c, t, s, n * (c->size ? c->size : 1), r, n);
  logged(&k, n, op_name(op), -1);
  move(&k, 0, c->size ? c->rank * n : 0, n);
  return 0;
}
int ncclAlltoAll(const void *s, void *r, size_t n, int t, communicator *c, void *st) {
  size_t all = n * (c->size ? c->size : 1);
  call k = checked("all_to_all", c, t, s, all, r, all);
  logged(&k, n, "", -1);
  poison(k.to, all * widths[t]);
  return 0;
}
int ncclSend(const void *s, size_t n, int t, int peer, communicator *c, void *st) {
  call k = checked("send", c, t, s, n, NULL, 0);
  logged(&k, n, "", peer);
  return 0;
}
int ncclRecv(void *r, size_t n, int t, int peer, communicator *c, void *st) {
  call k = checked("recv", c, t, NULL, 0, r, n);
  logged(&k, n, "", peer);
  poison(k.to, n * widths[t]);
  return 0;
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int t, int residence, communicator *c) { *op = 5; return 0; }
