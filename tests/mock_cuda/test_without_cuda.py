"""What of the imitated CUDA machine needs no CUDA build of torch: fakes in place of the device, and its NCCL alone."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.cuda_logs.agreement import check_logs
from tests.cuda_logs.logs import read_logs
from tests.mock_cuda.run import NEEDED, ROOT, differences

RANKS = 4
_FLOAT, _SUM = 7, 0
# What nccl.c asks of the other parts: one device, whose memory is the host's.
_REST = """
#include "imitation.h"
int current_device(void) { return 0; }
void *on_device(const char *call, const char *what, const void *address, size_t bytes, int device) {
  return (void *)address;
}
void poison(void *address, size_t bytes) { memset(address, 255, bytes); }
void refuse(const char *call, const char *format, ...) { abort(); }
"""


@pytest.mark.parametrize("case", ["unet:autocast", pytest.param("mixtral:bfloat16", marks=pytest.mark.slow)])
def test_graphs_for_gpus_have_the_shapes_strides_and_devices_of_their_fakes(case: str) -> None:
    command = [sys.executable, "-m", "tests.mock_cuda.checks.graphs", "--fakes", case]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("case: passed") == 1


def _rank(library: str, prefix: str, rank: int) -> None:
    os.environ["MOCK_LOG"] = prefix
    nccl = ctypes.CDLL(library)
    libc = ctypes.CDLL(None)
    libc.setenv(b"MOCK_LOG", prefix.encode(), 1)
    id_bytes = (ctypes.c_char * 128)()
    world, part = ctypes.c_void_p(), ctypes.c_void_p()
    nccl.ncclCommInitRankScalable(ctypes.byref(world), RANKS, rank, 1, ctypes.byref(id_bytes), None)
    nccl.ncclCommSplit(world, rank // 2, rank % 2, ctypes.byref(part), None)
    data, out = (ctypes.c_float * 8)(), (ctypes.c_float * 8)()
    for _ in range(500):
        nccl.ncclAllReduce(data, out, ctypes.c_size_t(8), _FLOAT, _SUM, part, None)
    nccl.ncclGroupStart()
    nccl.ncclSend(data, ctypes.c_size_t(8), _FLOAT, (rank + 1) % RANKS, world, None)
    nccl.ncclRecv(out, ctypes.c_size_t(8), _FLOAT, (rank - 1) % RANKS, world, None)
    nccl.ncclGroupEnd()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the imitation is built by gcc")
def test_the_logs_of_its_nccl_are_read(tmp_path: Path) -> None:
    rest, library = tmp_path / "rest.c", tmp_path / "nccl.so"
    rest.write_text(_REST)
    folder = ROOT / "tests" / "mock_cuda" / "imitation"
    build = ["gcc", "-shared", "-fPIC", f"-I{folder}", str(folder / "nccl.c"), str(rest), "-o", str(library)]
    subprocess.run(build, check=True)
    context, prefix = get_context("spawn"), tmp_path / "nccl"
    ranks = [context.Process(target=_rank, args=(str(library), str(prefix), rank)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    agreement = check_logs(read_logs(prefix))
    assert not agreement.problems
    assert sorted((c.size, c.made) for c in agreement.communicators) == [
        (2, "split"),
        (2, "split"),
        (4, "init"),
    ]
    assert agreement.kinds == {"all_reduce": 500 * RANKS, "send": RANKS, "recv": RANKS}


def test_an_environment_that_differs_is_named() -> None:
    constraints = "# tested\ntorch==2.13.0\ntransformers==5.23.0\nruff==0.17.5\n"
    assert differences({"torch": "2.13.0+cu130", "transformers": "5.23.0"}, constraints) == []
    assert differences({"torch": "2.14.0", "ruff": "0.1"}, constraints) == [
        "torch is 2.14.0; 2.13.0 is what constraints.txt names",
        "transformers is not installed; 5.23.0 is what constraints.txt names",
        "ruff is 0.1; 0.17.5 is what constraints.txt names",
    ]
    tested = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in tested for name in NEEDED)
