"""Loaders, compilers, profilers, habits from data parallelism."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoshard
from tests.scripts.parts import batch, gradients, net, state, step, train
from tests.scripts.script import Make, refused, stopped


def data_loader_of_parts(make: Make) -> Any:
    """`autoshard.data_loader` beside `in_placements`; in one process torch's DataLoader."""
    data = TensorDataset(*batch(0, 16))
    if make.mesh is None:
        loader: Any = DataLoader(data, batch_size=8)
    else:
        loader = autoshard.data_loader(data, make.mesh, [Shard(0)], batch_size=8)
    model = make(Loss(), in_placements=[Shard(0)])
    return _trained_on(model, loader)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.inner(x), y)


def _trained_on(model: Any, loader: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model)]


def batches_per_rank_with_in_placements(make: Make) -> Any:
    """Every rank loads its own samples, as under DistributedDataParallel, and says so."""
    model = make(Loss(), in_placements=[Shard(0)])
    rows = 8 // make.ranks
    mine = slice(make.rank * rows, (make.rank + 1) * rows)
    parts = [[value[mine] for value in batch(number)] for number in range(3)]
    return _trained_on(model, parts)


def batches_per_rank_of_other_sizes(make: Make) -> Any:
    """As many rows as a rank happens to have, in each batch; of two ranks the first has as many as before."""
    model = make(Loss(), batch="per_rank")
    parts: list[list[torch.Tensor]] = []
    for number, rows in enumerate([(4, 4), (4, 3), (4, 4), (2, 1)]):
        each = [[value[: rows[0]], value[4 : 4 + rows[1]]] for value in batch(number)]
        parts.append([torch.cat(two) if make.ranks == 1 else two[make.rank] for two in each])
    return _trained_on(model, parts)


def distributed_sampler_per_rank(make: Make) -> Any:
    data = TensorDataset(*batch(0, 16))
    sampler = DistributedSampler(data, make.ranks, make.rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // make.ranks, sampler=sampler)
    return _trained_on(make(Loss(), batch="per_rank"), loader)


@refused("in_placements")
def distributed_sampler(make: Make) -> Any:
    data = TensorDataset(*batch(0, 16))
    sampler = DistributedSampler(data, make.ranks, make.rank, shuffle=False)
    return _trained_on(make(Loss()), DataLoader(data, batch_size=4, sampler=sampler))


@refused("in_placements")
def shuffled_with_a_seed_per_rank(make: Make) -> Any:
    order = torch.Generator().manual_seed(make.rank)
    return _trained_on(
        make(Loss()), DataLoader(TensorDataset(*batch(0, 16)), 8, shuffle=True, generator=order)
    )


def shuffled_with_one_seed(make: Make) -> Any:
    order = torch.Generator().manual_seed(5)
    return _trained_on(
        make(Loss()), DataLoader(TensorDataset(*batch(0, 16)), 8, shuffle=True, generator=order)
    )


def data_parallel_habits(make: Make) -> Any:
    """`getattr(model, "module", model)` around everything, printing and saving on rank 0 alone."""
    model = make(net())
    raw = getattr(model, "module", model)
    result = train(raw, torch.optim.SGD(raw.parameters(), 0.1))
    if make.rank == 0:
        print(result[0])
    return result


@refused("DataParallel")
def data_parallel_before_autoshard(make: Make) -> Any:
    return make(nn.DataParallel(net()))(batch()[0])


def compiled_after_autoshard(make: Make) -> Any:
    model = make(net(), batch()[:1])
    fast = torch.compile(model, backend="eager")
    x, y = batch()
    F.mse_loss(fast(x), y).backward()
    return gradients(model)


def compiled_loss_outside(make: Make) -> Any:
    model = make(net())
    criterion = torch.compile(lambda out, y: ((out - y) ** 2).mean(), backend="eager")
    x, y = batch()
    loss = criterion(model(x), y)
    loss.backward()
    return [loss, gradients(model)]


@refused("inside a transform of torch.func")
def functional_gradients(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    model(x)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


def functional_call_with_other_parameters(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    first = model(x)
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    return [first, torch.func.functional_call(model, doubled, (x,)), model(x)]


def per_sample_gradients_by_loop(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    norms: list[float] = []
    for i in range(3):
        model.zero_grad()
        F.mse_loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        norms.append(float(model.up.weight.grad.norm()))
    return norms


def profiled(make: Make) -> Any:
    model = make(net(), batch()[:1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("my step"):
        loss = step(model, optimizer, *batch())
    names = {event.key for event in recorded.key_averages()}
    return [loss, "my step" in names]


def anomaly_detection(make: Make) -> Any:
    model = make(net())
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)


def parameters_counted_and_printed(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return [sum(p.numel() for p in model.parameters()), names, "Linear" in repr(model), type(model).__name__]


def logged_to_a_file(make: Make) -> Any:
    """Rank 0 writes losses and gradient norms; `.item()` on every rank."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lines: list[str] = []
    for number in range(2):
        loss = step(model, optimizer, *batch(number))
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        lines.append(f"{loss:.3f} {norm.item():.3f}")
    if make.rank == 0:
        Path(tempfile.mkdtemp(), "log.txt").write_text("\n".join(lines))
    return lines


@stopped("the ranks do different things")
def evaluation_on_rank_0_alone(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [step(model, optimizer, *batch())]
    if make.rank == 0:
        with torch.no_grad():
            losses.append(F.mse_loss(model.eval()(batch(1)[0]), batch(1)[1]).item())
    return [*losses, step(model.train(), optimizer, *batch(2))]
