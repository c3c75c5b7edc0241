"""Collectives as a lowered graph runs them: a functional collective, the wait for it, and the copies around.

| kind           | what is timed                                                                       |
| all_gather     | gather along dim 1: the collective, then the copy that puts the parts side by side  |
| reduce_scatter | along dim 1: the copy that puts the parts one after the other, then the collective  |
| all_to_all     | from dim 0 to dim 1: that copy, then the collective                                 |
| all_reduce     | the collective, out of place                                                        |
| point_to_point | every rank sends one half to the next of its group and one to the one before       |

On CPUs ranks of one host go through shared memory, and small messages in one round
(`cost_model.measure.own_collectives`), as in a lowered graph.
Along dim 0 there are no copies: the price is that of the more expensive case. Data is float32, reductions are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.measure import own_collectives as own
from cost_model.measure.clock import Clock, Work
from cost_model.measure.peers import Team
from cost_model.measure.sampling import Series
from cost_model.measurements import PLAN_KINDS, SampledCurve

c10d = torch.ops._c10d_functional
_ITEMSIZE = 4  # float32

IN_A_ROW_SECONDS = 2e-2
"""The least seconds of a row of calls of a small collective. The first few after a barrier are cheap, as nobody is late
yet: two messages over 4 ranks on 2 cores took 0.65 ms in two calls, and 1.2 ms in fifty."""


class Buffers:
    """Arguments of works on one device. They are views of few tensors, since hundreds of works are kept at a time.

    Works run one after the other, and nobody reads the values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def take(self, slot: str, nbytes: int) -> Tensor:
        """float32 [nbytes / 4]; two of the same slot share memory."""
        count = nbytes // _ITEMSIZE
        held = self._slots.get(slot)
        if held is None or held.numel() < count:
            held = self._slots[slot] = torch.ones(count, dtype=torch.float32, device=self._device)
        return held[:count]


def whole_size(nbytes: int, ranks: int) -> int:
    """`nbytes` rounded up to a multiple of `ranks` ** 2 elements, which a group can cut into equal 2-d parts."""
    unit = ranks * ranks * _ITEMSIZE
    return -(-nbytes // unit) * unit


def collective_work(kind: str, team: Team, buffers: Buffers, nbytes: int) -> Work:
    """The work to time: `kind` over `team` with `nbytes`, as `cost_model.collectives` counts them.

    nbytes: from `whole_size`. Memory for arguments and result is taken here, so that too little of it
    shows before anyone waits for anyone.
    """
    whole = buffers.take("sent", nbytes)
    torch.empty_like(whole)
    return _WORK[kind](team, whole, buffers)


def _stack(x: Tensor, parts: int) -> Tensor:
    """[a, parts * s] -> [parts * a, s]: the part of each rank in one piece."""
    rows, columns = x.shape
    cut = x.view(rows, parts, columns // parts).permute(1, 0, 2).contiguous()
    return cut.view(parts * rows, columns // parts)


def _unstack(x: Tensor, parts: int) -> Tensor:
    """The inverse of `_stack`."""
    rows = x.shape[0] // parts
    return x.view(parts, rows, x.shape[1]).permute(1, 0, 2).contiguous().view(rows, parts * x.shape[1])


def _all_gather(team: Team, whole: Tensor, _: Buffers) -> Work:
    n, name = team.size, team.name
    part = whole[: whole.numel() // n].view(n, -1)
    gather = c10d.all_gather_into_tensor.default

    def gathered() -> Tensor:
        started = own.all_gather(part, team.group)
        return c10d.wait_tensor.default(gather(part, n, name)) if started is None else own.finished(started)

    return lambda: _unstack(gathered(), n)


def _reduce_scatter(team: Team, whole: Tensor, _: Buffers) -> Work:
    n, name = team.size, team.name
    rows = whole.view(n, -1)
    reduce = c10d.reduce_scatter_tensor.default

    def reduced() -> Tensor:
        stacked = _stack(rows, n)
        result = own.reduce_scatter(stacked, "sum", team.group)
        return c10d.wait_tensor.default(reduce(stacked, "sum", n, name)) if result is None else result

    return reduced


def _all_to_all(team: Team, whole: Tensor, _: Buffers) -> Work:
    n, name = team.size, team.name
    rows = whole.view(n, -1)
    splits = [n] * n  # rows of the stacked [n * n, columns]
    if whole.device.type == "cpu":
        return lambda: own.finished(own.start_all_to_all(_stack(rows, n), splits, splits, team.group))
    exchange = c10d.all_to_all_single.default
    return lambda: c10d.wait_tensor.default(exchange(_stack(rows, n), splits, splits, name))


def _all_reduce(team: Team, whole: Tensor, _: Buffers) -> Work:
    reduce = c10d.all_reduce.default

    def reduced() -> Tensor:
        result = own.all_reduce(whole, "sum", team.group)
        return c10d.wait_tensor.default(reduce(whole, "sum", team.name)) if result is None else result

    return reduced


def _point_to_point(team: Team, whole: Tensor, buffers: Buffers) -> Work:
    me = team.ranks.index(dist.get_rank())
    neighbours = dict.fromkeys(
        (team.ranks[(me + 1) % team.size], team.ranks[me - 1])
    )  # one, in a group of two
    arrived = buffers.take("arrived", whole.numel() * _ITEMSIZE)
    ends: list[tuple[Callable[..., object], Tensor, int]] = []
    for peer, sent, into in zip(
        neighbours, *(x.chunk(len(neighbours)) for x in (whole, arrived)), strict=True
    ):
        ends += [(dist.isend, sent, peer), (dist.irecv, into, peer)]

    def exchange() -> None:
        operations = [dist.P2POp(op, tensor, peer, team.group) for op, tensor, peer in ends]
        for pending in dist.batch_isend_irecv(operations):
            pending.wait()

    return exchange


_WORK: Mapping[str, Callable[[Team, Tensor, Buffers], Work]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "point_to_point": _point_to_point,
    "reduce_scatter": _reduce_scatter,
}
assert set(_WORK) == set(PLAN_KINDS)


PRODUCTS, _EDGE = 10, 128
"""Float32 products and their edge: 42 million operations, about a millisecond of a core."""


class Pause:
    """Computing before a collective that is timed: `products` products, as it comes in a step behind some computing.

    Ranks that compute between two collectives come to the next one at different times, above all where they share
    cores, and processes that slept must wake. Messages between 2 ranks on 2 cores took 0.2 ms in a row without a pause,
    0.5 ms behind half a millisecond of products, and 1.8 ms behind two. The price of a collective is the time of both
    less that of the products alone.

    Results are kept until all are there, as a step keeps what it computes. Ranks that find memory in between are less
    regular: behind 22 ms they came 2.4 to 2.6 ms late without, and 2.6 to 3.9 with it.
    """

    def __init__(self, device: torch.device, products: int = PRODUCTS) -> None:
        self.products = products
        self._x = torch.ones(_EDGE, _EDGE, device=device)

    def __call__(self) -> None:
        results = [torch.mm(self._x, self._x) for _ in range(self.products)]
        del results


def pause_series(pause: Pause, clock: Clock) -> Series:
    """The series of the products alone, by the clock of kernels. size: their number."""
    return Series(
        "pause", (max(1, pause.products),), lambda _: pause, least=IN_A_ROW_SECONDS, ahead=True, clock=clock
    )


def collective_series(
    name: str,
    kind: str,
    team: Team,
    sizes: tuple[int, ...],
    buffers: Buffers,
    pause: Pause,
    always: tuple[int, ...] = (),
    calls: int = 1,
) -> Series:
    """The series of the products and then `kind` over the team's group, at least `calls` times in a row.

    Sizes are bytes by `cost_model.collectives`."""

    def prepare(nbytes: int) -> Work:
        communicate = collective_work(kind, team, buffers, nbytes)

        def both() -> None:
            pause()
            communicate()

        return both

    return Series(name, sizes, prepare, least=IN_A_ROW_SECONDS, always=always, calls=calls, ahead=True)


def beyond_pause(curve: SampledCurve, pause: SampledCurve) -> SampledCurve:
    """The time of a series' collective beyond the pause before it."""
    (alone,) = pause.seconds
    # A tenth of both is the collective's at least: noise may leave less of a short one.
    left = lambda seconds: max(seconds - alone, 0.1 * seconds)
    spread = zip(curve.spread, curve.medians, strict=True)
    return replace(
        curve,
        medians=tuple(map(left, curve.medians)),
        seconds=tuple(map(left, curve.seconds)),
        spread=tuple(round(share * both / left(both), 4) for share, both in spread),
    )
