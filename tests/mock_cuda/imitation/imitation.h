/* What the parts of the imitation share. ../README.md says what is imitated and what is checked. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number in an environment variable, or `otherwise`. */
long setting(const char *name, long otherwise);
int device_count(void);       /* MOCK_GPUS */
int compute_capability(void); /* MOCK_CC: 90 is 9.0 */
int current_device(void);     /* of this thread, as cudaSetDevice left it */

/* A zeroed object that stands for a handle; never freed. */
void *token(void);

/* Say which call was given what, and abort. Python prints its stack (PYTHONFAULTHANDLER). */
__attribute__((noreturn, format(printf, 2, 3))) void refuse(const char *call, const char *format, ...);

/* ---- memory.c ---- */
enum place { HOST, PINNED, DEVICE };

/* Device memory lies where nobody may read or write; `usable` gives the address at which the imitation may. */
int allocate(void **address, size_t bytes, int device); /* 0, or 2 (out of memory) */
int release(void *address);                             /* 0, or 1 (no allocation begins there) */
int allocate_pinned(void **address, size_t bytes);
int release_pinned(void *address);
size_t free_bytes(int device);
size_t total_bytes(void);

enum place place_of(const void *address);
int device_of(const void *address); /* -1 if it is no device memory */

/* Where the imitation can read and write the `bytes` at `address`, wherever they are. Refuses device memory
   that is freed, or not as long as that. */
void *usable(const char *call, const char *what, const void *address, size_t bytes);

/* The same for an argument that a kernel will use: it must be on `device`, or pinned. NULL only if bytes is 0. */
void *on_device(const char *call, const char *what, const void *address, size_t bytes, int device);

/* A pointer in a kernel's arguments, whose length nobody tells: NULL, or in (or just behind) living memory of `device`. */
void kernel_pointer(const char *kernel, int argument, const void *address, int device);

/* Whether this process has anything mapped at the address. */
int is_mapped(const void *address);

/* Write over what a kernel would have written. */
void poison(void *usable_address, size_t bytes);

/* ---- elf.c ---- */
/* Sizes of the parameters of `kernel` in a cubin; how many, or -1 if the image is no cubin or does not have it. */
int parameter_sizes(const void *image, const char *kernel, int *sizes, int most);

/* ---- nccl.c ---- */
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
