/* A cubin is an ELF file; `.nv.info.KERNEL` lists the kernel's parameters. Seen with `cuobjdump -elf`: entries of a format
   byte, an attribute byte and 16 bits, which are the value (format 3) or the bytes of a value that follows
   (format 4). Attribute 0x17 with 12 bytes is a parameter: ordinal in bytes 4-5, its size above bit 18 of the last word. */
#include "imitation.h"
#include <elf.h>

enum { HAS_BYTES = 4, PARAMETER = 0x17 };

static int read_parameters(const unsigned char *at, size_t bytes, int *sizes, int most) {
  int count = 0;
  for (size_t i = 0; i + 4 <= bytes;) {
    unsigned length = at[i + 2] | at[i + 3] << 8;
    if (at[i] != HAS_BYTES) {
      i += 4;
      continue;
    }
    if (at[i + 1] == PARAMETER && length == 12) {
      uint16_t ordinal;
      uint32_t word;
      memcpy(&ordinal, at + i + 4 + 4, 2);
      memcpy(&word, at + i + 4 + 8, 4);
      if (ordinal < most) {
        sizes[ordinal] = (int)(word >> 18);
        if (ordinal >= count) count = ordinal + 1;
      }
    }
    i += 4 + length;
  }
  return count;
}

int parameter_sizes(const void *image, const char *kernel, int *sizes, int most) {
  const unsigned char *file = image;
  if (!image || memcmp(file, ELFMAG, SELFMAG) != 0 || file[EI_CLASS] != ELFCLASS64) return -1;
  const Elf64_Ehdr *header = image;
  const Elf64_Shdr *sections = (const void *)(file + header->e_shoff);
  const char *names = (const char *)file + sections[header->e_shstrndx].sh_offset;
  char wanted[4096];
  snprintf(wanted, sizeof wanted, ".nv.info.%s", kernel);
  for (int i = 0; i < header->e_shnum; i++)
    if (strcmp(names + sections[i].sh_name, wanted) == 0)
      return read_parameters(file + sections[i].sh_offset, sections[i].sh_size, sizes, most);
  return -1;
}
