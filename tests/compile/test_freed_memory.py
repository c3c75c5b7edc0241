"""What a step frees stays with the process: seen in processes of their own, by what the C library says of itself."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import torch
from passes.compile.single_kernel import keep_freed_memory

class MallInfo(ctypes.Structure):  # mallinfo(3)
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

c = ctypes.CDLL(None)
c.mallinfo2.restype = MallInfo
if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))
del [torch.ones(2_500_000) for _ in range(3)][:]  # 3 x 10 MB at once, and all of them freed
print(c.mallinfo2().fordblks)  # bytes that are free and still the process's
"""


def new_enough() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split("."))) >= (2, 33)


@pytest.mark.skipif(not new_enough(), reason="mallinfo2 is of glibc 2.33")
def test_freed_blocks_are_kept() -> None:
    def free(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert free("kept") >= 30_000_000 > 10_000_000 > free("as ever")
