"""The memory that the ranks of a group share, where all of them are on one host: set up once for each group.

All ranks of the group come here at their first collective. They tell each other their hosts; where that is one, the
first makes a folder in memory with a file and a socket of every rank, all open them, and it is removed again. Its maker
has it locked meanwhile: what one that was killed left behind is removed by the next. Every step is agreed on: where one
rank cannot (no such folder, no room in it), all go without.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from cost_model.measure.host_memory import HostMemory, memory_nbytes
from cost_model.measure.peers import host_name, machine_id

T = TypeVar("T")

_log = logging.getLogger("autoshard")

_IN_MEMORY = Path("/dev/shm")
"""Linux's. Elsewhere files are on disks."""
_PREFIX = "autoshard-ranks-"
_TEXT_NBYTES = 256
"""Room for what a rank says: a host's name, a folder's."""

_known: WeakKeyDictionary[dist.ProcessGroup, HostMemory | None] = WeakKeyDictionary()
"""As torch keeps its groups: by process, until they are destroyed."""


def host_memory_of(group: dist.ProcessGroup) -> HostMemory | None:
    """The memory that the ranks of `group`, this one among them, share; None if they are on several hosts, or cannot.

    All ranks of the group ask at the same collective. At the first one they wait for each other, over gloo.
    """
    if group not in _known:
        # Of more ranks a chunk of memory is next to nothing.
        _known[group] = _set_up(group) if 1 < group.size() <= 256 else None
    return _known[group]


def cut_host_memory() -> None:
    """Every wait of this process for ranks of its host raises RuntimeError, and theirs for it. From any thread."""
    for shared in list(_known.values()):
        if shared is not None:
            shared.cut()


def _set_up(group: dist.ProcessGroup) -> HostMemory | None:
    if len(set(_everyones(group, f"{host_name()} {machine_id()} {_network()}"))) > 1:
        return None
    with ExitStack() as held:
        folder = _everyones(group, _new_folder(group.size(), held) if group.rank() == 0 else "")[0]
        return _joined(group, Path(folder)) if folder else None


def _network() -> str:
    """This process's network namespace (Linux): ranks in several were put apart, as containers
    are, and each rank of an emulated host that has a link of its own."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _new_folder(ranks: int, held: ExitStack) -> str:
    """Holding a file that has room for sure; "": there is none. held: removes it."""
    try:
        if _IN_MEMORY.is_dir():
            _remove_left()
            folder = _locked_folder(held)
            with open(_memory_file(folder), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, memory_nbytes(ranks))
            return folder
    except OSError as error:
        _log.info("ranks of this host share no memory, and send all over gloo: %s", error)
    return ""


def _locked_folder(held: ExitStack) -> str:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_IN_MEMORY)
        with suppress(FileNotFoundError), ExitStack() as lock:
            _lock(folder, lock, fcntl.LOCK_EX)
            os.stat(folder)  # another start may have removed it before it was locked
            held.push(lock.pop_all())
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            return folder


def _remove_left() -> None:
    """The folders whose makers are dead: the kernel has given up their locks, in other containers, too."""
    for folder in _IN_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError), ExitStack() as lock:
            _lock(folder, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: str | Path, held: ExitStack, how: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, how)


def _joined(group: dist.ProcessGroup, folder: Path) -> HostMemory | None:
    """With the memory in `folder`, connected with every other rank."""
    rank, ranks = group.rank(), group.size()
    server = _agreed(group, lambda: _listening(_socket_file(folder, rank), ranks))
    if server is None:
        return None
    with server, ExitStack() as held:
        opened = _agreed(group, lambda: (_mapped(folder, ranks), _connected(folder, rank, held)))
        if opened is None:
            return None
        memory, lower = opened
        higher = dict(_accepted(server) for _ in range(rank + 1, ranks))
        peers = [*lower, *(higher[peer] for peer in sorted(higher))]
        for peer in peers:
            peer.settimeout(_patience(group))
        shared = HostMemory(rank, ranks, memory, peers)
        held.pop_all()
    # The folder stays until all have what is in it.
    _everyones(group, "")
    return shared


def _patience(group: dist.ProcessGroup) -> float:
    """Seconds that a rank waits for another in a collective: as long as gloo."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()


def _mapped(folder: Path, ranks: int) -> torch.Tensor:
    with open(_memory_file(folder), "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), memory_nbytes(ranks)), dtype=torch.uint8)


def _listening(path: Path, ranks: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(ranks)
    return server


def _connected(folder: Path, rank: int, held: ExitStack) -> list[socket.socket]:
    """To each rank before this one, which listens by now. held: closes them."""
    peers: list[socket.socket] = []
    for peer in range(rank):
        peers.append(held.enter_context(socket.socket(socket.AF_UNIX)))
        peers[-1].connect(str(_socket_file(folder, peer)))
        peers[-1].sendall(rank.to_bytes(4, "little"))
    return peers


def _accepted(server: socket.socket) -> tuple[int, socket.socket]:
    """A rank that has connected, and the socket to it."""
    peer, _ = server.accept()
    return int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little"), peer


def _memory_file(folder: str | Path) -> Path:
    return Path(folder) / "memory"


def _socket_file(folder: Path, rank: int) -> Path:
    return folder / str(rank)


def _agreed(group: dist.ProcessGroup, step: Callable[[], T]) -> T | None:
    """step() on every rank; None on all of them where one fails."""
    try:
        result: T | None = step()
    except OSError as error:
        _log.info("ranks of this host share no memory, and send all over gloo: %s", error)
        result = None
    return result if all(_everyones(group, "" if result is None else "done")) else None


def _everyones(group: dist.ProcessGroup, text: str) -> Sequence[str]:
    """By rank."""
    mine = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    found = [torch.empty(_TEXT_NBYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(found, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found]
