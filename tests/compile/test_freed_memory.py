"""What glibc gives back to the system is mapped again page by page: seen in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from passes.compile.freed_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))

def step():  # 5 x 16 MB alive at once, and all of them freed
    del [torch.ones(2**22 - 2**14) for _ in range(5)][:]

torch.set_num_threads(1)
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_pages_are_mapped_once() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 1000 < 5000 < faults("as ever")
