"""Check: the imitation refuses what would be wrong on a GPU, and runs what would be right.

python -m tests.mock_cuda.checks.imitation
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.mock_cuda.checks.report import Report

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def _copy(to: int, source: int, nbytes: int, kind: int) -> None:
    ctypes.CDLL(None).cudaMemcpy(
        ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), ctypes.c_int(kind)
    )


def _pretended(pointer: int, *shape: int) -> torch.Tensor:
    """A float32 tensor that says it is on cuda:0, wherever its memory lies."""
    device = torch.device("cuda", 0)
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, 4 * torch.Size(shape).numel())
    return torch.empty(0, device=device).set_(storage, 0, shape)


def _follow_a_device_pointer() -> None:
    ctypes.string_at(torch.zeros(4, device="cuda").data_ptr(), 4)


def _copy_to_a_host_pointer_as_device() -> None:
    host = torch.zeros(4)
    _copy(host.data_ptr(), host.data_ptr(), 8, HOST_TO_DEVICE)


def _copy_from_freed_memory() -> None:
    host, freed = torch.zeros(4), torch.zeros(4, device="cuda").data_ptr()
    _copy(host.data_ptr(), freed, 8, DEVICE_TO_HOST)


def _copy_past_the_end() -> None:
    host, device = torch.zeros(32), torch.zeros(16, device="cuda")
    _copy(host.data_ptr(), device.data_ptr(), 65, DEVICE_TO_HOST)


def _host_pointer_in_a_kernel() -> None:
    host = torch.zeros(16)
    _pretended(host.data_ptr(), 16).add_(1)


def _host_pointer_in_a_product() -> None:
    host = torch.zeros(4, 4)
    torch.zeros(4, 4, device="cuda") @ _pretended(host.data_ptr(), 4, 4)


def _another_devices_memory_in_a_kernel() -> None:
    other = torch.zeros(16, device="cuda:1")
    _pretended(other.data_ptr(), 16).mul_(2)


def _host_pointer_in_a_convolution() -> None:
    host = torch.zeros(1, 3, 8, 8)
    F.conv2d(_pretended(host.data_ptr(), 1, 3, 8, 8), torch.zeros(4, 3, 3, 3, device="cuda"))


def _host_pointer_in_triton() -> None:
    host, device = torch.zeros(16), torch.zeros(16, device="cuda")
    function = torch.compile(lambda a, b: a.sin() + b)
    function(device, device + 1)
    function(_pretended(host.data_ptr(), 16), device)


def _host_pointer_in_nccl() -> None:
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    host = torch.zeros(16)
    dist.all_reduce(_pretended(host.data_ptr(), 16))


# Wrong -> what the process must say as it dies.
WRONG: dict[Callable[[], None], str] = {
    _follow_a_device_pointer: "Segmentation fault",
    _copy_to_a_host_pointer_as_device: "refuses cudaMemcpy: the destination is a host pointer",
    _copy_from_freed_memory: "refuses cudaMemcpy: the source",
    _copy_past_the_end: "65 bytes at offset 0 of an allocation of 64",
    _host_pointer_in_a_kernel: "vectorized_elementwise_kernel",
    _host_pointer_in_a_product: "is a host pointer",
    _another_devices_memory_in_a_kernel: "is on device 1, the call on device 0",
    _host_pointer_in_a_convolution: "refuses cudnnBackendExecute: tensor",
    _host_pointer_in_triton: "is a host pointer",
    _host_pointer_in_nccl: "refuses all_reduce: the send buffer is a host pointer",
}


def _copies_and_scalars() -> None:
    values = torch.arange(12).view(3, 4)
    there = values.cuda()
    assert there.cpu().equal(values) and there[2, 1].item() == 9
    assert there.T.contiguous().shape == (4, 3)
    pinned = values.pin_memory()
    assert pinned.is_pinned() and pinned.to("cuda", non_blocking=True).cpu().equal(values)


def _results_are_poison() -> None:
    x = torch.ones(8, device="cuda")
    assert (x + 1).sum().isnan().cpu().numel() == 1
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(3, device="cuda", dtype=dtype).add(1).cpu().isnan().all(), dtype
    assert (torch.ones(3, device="cuda", dtype=torch.int64) + 1).tolist() == [-1, -1, -1]


def _convolutions_and_norms_through_cudnn() -> None:
    assert torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    for dtype in (torch.float32, torch.bfloat16):
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, stride=2))
        model = layers.cuda().to(dtype)
        x = torch.randn(2, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        model(x).float().sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        model.eval()(x)
        assert model(x.to(memory_format=torch.channels_last)).shape == (2, 4, 28, 28)


def _recurrent_layers_through_cudnn() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(8, 16, 2, bidirectional=True, batch_first=True).cuda()
        assert layer(torch.randn(2, 5, 8, device="cuda"))[0].shape == (2, 5, 32)


def _fused_attention() -> None:
    for backend in (
        SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
    ):  # fmt: skip
        q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


def _out_of_memory() -> None:
    try:
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:  # torch's cache, where it is on, makes an OutOfMemoryError of it
        assert "out of memory" in str(error), error
        return
    raise AssertionError("100 GiB fitted into 80")


RIGHT = (
    _copies_and_scalars, _results_are_poison, _convolutions_and_norms_through_cudnn, _recurrent_layers_through_cudnn,
    _fused_attention, _out_of_memory,
)  # fmt: skip


def _named(function: Callable[[], None]) -> str:
    return function.__name__.strip("_").replace("_", " ")


def _dies(wrong: Callable[[], None], said: str) -> None:
    """In a process of its own, since it does not survive; a fork, since importing torch takes longest."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(writer, sys.stderr.fileno())
        try:
            wrong()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"survived, status {status}\n{text[-2000:]}"
    assert said in text, text[-2000:]


def main() -> None:
    report = Report()
    # First: a process that has used CUDA may not fork one that will.
    for wrong, said in WRONG.items():
        with report.case(f"refused: {_named(wrong)}"):
            _dies(wrong, said)
    for right in RIGHT:
        with report.case(_named(right)):
            right()
    report.exit()


if __name__ == "__main__":
    main()
