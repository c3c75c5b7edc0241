"""Collectives between the ranks of one host through memory that they share, which is set up once for each group.

gloo sends what ranks of one host have for each other through the network's loopback: every byte is copied into the
kernel and out again, and a ring takes 2 (n - 1) rounds in each of which ranks wait for each other. Here every rank
writes its part into memory that all of them see, all meet, and every rank reads what it needs:

    all-gather       write, meet, read all parts
    reduce-scatter   write, meet, sum this rank's piece of all parts
    all-reduce       write, meet, sum a piece of all parts, meet, read all pieces; little is summed whole, and all
                     ranks have met once

Sums are added up in the order of ranks, on all ranks alike: equal bit by bit. Much data goes in chunks. Two chunks of
memory take turns, so that no rank writes where another still reads: who writes into one for the second time has met
all others behind the first, when they had read it.

Ranks meet by one byte over sockets, and sleep until it comes: they may share cores. A rank that ends closes its
sockets, which wakes all others.

All ranks of the group come here at their first collective. They tell each other their hosts; where that is one, the
first makes a folder in memory with a file and a socket of every rank, all open them, and it is removed again. Its maker
has it locked meanwhile: what one that was killed left behind is removed by the next. Every step is agreed on: where one
rank cannot (no such folder, no room in it), all go without.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from cost_model.errors import log
from cost_model.measure.peers import Peers, host_name, machine_id

REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

_MOST_CHUNK, _MOST_MEMORY, _ALIGNED = 2**20, 2**24, 2**12
"""Bytes of a chunk of a rank, and of all memory of a group, at most: containers have 64 MiB to share. A chunk that
caches hold is the faster."""

_ENDED = "Connection closed: a rank of this host has ended, or was stopped, in a collective"
_LATE = "Connection timed out: a rank of this host did not come to a collective within its group's timeout"


def chunk_nbytes(ranks: int) -> int:
    """Bytes of each rank of a group, in each of two turns."""
    fair = _MOST_MEMORY // (2 * (ranks + 1))
    return max(_ALIGNED, min(_MOST_CHUNK, fair // _ALIGNED * _ALIGNED))


def memory_nbytes(ranks: int) -> int:
    """Bytes of a group: a chunk of each rank and one of results, twice."""
    return 2 * (ranks + 1) * chunk_nbytes(ranks)


@dataclass
class HostMemory:
    """One rank's end. memory: uint8 [memory_nbytes(ranks)], the same on all ranks. peers: a socket to each other rank.

    All ranks of the group call the same methods in the same order, with operands of equal shapes, contiguous or not,
    on the CPU. RuntimeError where a rank has ended, or does not come within the sockets' timeout.
    """

    rank: int
    ranks: int
    memory: Tensor
    peers: Sequence[socket.socket]
    _turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        finalize(self, _close, tuple(self.peers))

    def all_reduce(self, operand: Tensor, op: str, into: Tensor) -> Tensor:
        """`into`, contiguous and of the operand's shape: the sum (a key of `REDUCTIONS`) of all ranks'. It may be the
        operand."""
        result = into.view(-1)
        for begin, piece in _pieces(operand.reshape(-1), self._chunk(operand)):
            slots = self._written(piece)
            out = result[begin : begin + len(piece)]
            if piece.nbytes <= 2**15:  # every rank sums all of it: to meet once more takes longer
                reduced_in_order(slots[: self.ranks], op, out)
                continue
            mine = slice(len(piece) * self.rank // self.ranks, len(piece) * (self.rank + 1) // self.ranks)
            reduced_in_order(slots[: self.ranks, mine], op, slots[self.ranks, mine])
            self._meet()
            out.copy_(slots[self.ranks])
        return into

    def all_gather(self, operand: Tensor) -> Tensor:
        """operand: [a, ...]. Returns [ranks * a, ...]."""
        result = operand.new_empty((self.ranks * operand.shape[0], *operand.shape[1:]))
        parts = result.view(self.ranks, -1)
        for begin, piece in _pieces(operand.reshape(-1), self._chunk(operand)):
            parts[:, begin : begin + len(piece)].copy_(self._written(piece)[: self.ranks])
        return result

    def reduce_scatter(self, operand: Tensor, op: str) -> Tensor:
        """operand: [ranks * a, ...]. Returns [a, ...]: this rank's part."""
        result = operand.new_empty((operand.shape[0] // self.ranks, *operand.shape[1:]))
        parts, mine = operand.reshape(self.ranks, -1), result.view(-1)
        # A chunk holds a piece for every rank.
        for begin, piece in _pieces(mine, max(1, self._chunk(operand) // self.ranks)):
            end = begin + len(piece)
            slots = self._written(parts[:, begin:end]).view(self.ranks + 1, self.ranks, -1)
            reduced_in_order(slots[: self.ranks, self.rank], op, mine[begin:end])
        return result

    def cut(self) -> None:
        """Whoever waits here or in a collective with this rank gets an error. Any thread may call it."""
        for peer in self.peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _chunk(self, operand: Tensor) -> int:
        """Elements."""
        return chunk_nbytes(self.ranks) // operand.element_size()

    def _written(self, piece: Tensor) -> Tensor:
        """[ranks + 1, elements of piece]: every rank's, once all have written theirs; the last is for results."""
        self._turn = 1 - self._turn
        chunks = self.memory.view(2, self.ranks + 1, -1)[self._turn]
        slots = chunks[:, : piece.nbytes].view(piece.dtype)
        slots[self.rank].view(piece.shape).copy_(piece)
        self._meet()
        return slots

    def _meet(self) -> None:
        """Returns when every rank is here."""
        try:
            for peer in self.peers:
                peer.send(b"\0")
            ended = [peer for peer in self.peers if not peer.recv(1)]
        except TimeoutError as error:
            raise RuntimeError(_LATE) from error
        except OSError as error:
            raise RuntimeError(_ENDED) from error
        if ended:
            raise RuntimeError(_ENDED)


def _close(peers: Sequence[socket.socket]) -> None:
    for peer in peers:
        peer.close()


def _pieces(flat: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, flat.numel(), length):
        yield begin, flat[begin : begin + length]


def reduced_in_order(parts: Sequence[Tensor] | Tensor, op: str, out: Tensor | None = None) -> Tensor:
    """One after the other, so that all machines add in one order. op: a key of `REDUCTIONS`. Without `out` the result
    is a new tensor."""
    add = REDUCTIONS[op]
    total = add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        add(total, part, out=total)
    return total


T = TypeVar("T")

_IN_MEMORY = Path("/dev/shm")
"""Linux's. Elsewhere files are on disks."""
_PREFIX = "autoshard-ranks-"
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
    if len(set(Peers(group).everyones(f"{host_name()} {machine_id()} {_network()}"))) > 1:
        return None
    with ExitStack() as held:
        folder = Peers(group).everyones(_new_folder(group.size(), held) if group.rank() == 0 else "")[0]
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
        log.info("ranks of this host share no memory, and send all over gloo: %s", error)
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
    Peers(group).everyones("")
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
        log.info("ranks of this host share no memory, and send all over gloo: %s", error)
        result = None
    return result if all(Peers(group).everyones("" if result is None else "done")) else None
