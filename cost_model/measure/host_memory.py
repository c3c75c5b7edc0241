"""Collectives between the ranks of one host through memory that they share.

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
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import finalize

import torch
from torch import Tensor

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
