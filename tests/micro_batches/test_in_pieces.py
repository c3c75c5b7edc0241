"""A batch in pieces computes what the whole batch does: losses, gradients, dropout, outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.planning import canonical_capture
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph, repeats
from passes.ir.op_traits import is_product
from passes.micro_batches.cut_batch import cut_batch
from passes.micro_batches.in_pieces import in_pieces, without_uses
from passes.micro_batches.run_times import find_run_times
from passes.simulate.reference import graph_values, reference_inputs
from tests.micro_batches.whole_step import step_in_pieces
from tests.states.test_compute_again import Attending


class Tokens(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.embed(torch.arange(ids.shape[1]))
        return x + self.drop(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=3)


class LossAndLogits(Tokens):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


class Row(nn.Module):
    """Its loss reads one row of the batch, which one piece has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.last(torch.tanh(self.first(x)))
        return z[0].sum() + z.square().mean(), z[-1]


class Halves(nn.Module):
    """A `cat` of parts of the batch, which pieces of two samples and one would cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:2], x[2:] * 2]).sum() + self.linear(x).sum()


class Added(nn.Module):
    """Rows that are added up, onto zeros and onto what was there: one piece would read that, the others not."""

    def __init__(self, onto_zeros: bool) -> None:
        super().__init__()
        self.base, self.weight = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.onto_zeros = onto_zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, base = (x @ self.weight.t()).argmax(-1), self.base.exp()
        base = torch.zeros_like(base) if self.onto_zeros else base
        return base.index_add(0, rows, x * self.weight[rows])


def _ids(batch: int) -> torch.Tensor:
    return torch.randint(0, 20, (batch, 6))


def _image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 2, 9, 8, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tokens": (Tokens, _ids),
    "tied": (lambda: Tokens(tied=True), _ids),
    "loss and logits": (LossAndLogits, _ids),
    "attention": (Attending, lambda batch: torch.randn(batch, 6, 8, dtype=torch.float64)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)
        ),
        _image,
    ),
    "a row": (Row, lambda batch: torch.randn(batch, 4, dtype=torch.float64)),
    "halves": (Halves, lambda batch: torch.randn(3, dtype=torch.float64)),
    "added": (lambda: Added(False), lambda batch: torch.randn(batch, 4, dtype=torch.float64)),
    "added to zeros": (lambda: Added(True), lambda batch: torch.randn(batch, 4, dtype=torch.float64)),
    "a bias once": (
        lambda: nn.Conv2d(4, 2, 1),
        lambda batch: torch.randn(1, 4, 1, 1, dtype=torch.float64),
    ),
    "frozen statistics": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4).eval()), _image),
}


def pieces_of(joint: JointGraph, count: int) -> list[JointGraph]:
    plain = without_uses(joint)
    times = find_run_times(plain, count)
    return [in_pieces(plain, times, index) for index in range(count)]


def model_and_values(name: str, batch: int) -> tuple[JointGraph, list[torch.Tensor]]:
    torch.manual_seed(0)
    build, make = MODELS[name]
    model, x = build().double(), make(batch)
    joint = canonical_capture(model, (x,), {}).joint
    return joint, reference_inputs(joint, model, [x], seed=1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "count"), [(8, 1), (8, 2), (8, 4), (8, 5), (3, 3), (7, 4)])
def test_the_numbers_of_the_whole_batch(name: str, batch: int, count: int) -> None:
    joint, values = model_and_values(name, batch)
    wanted, _ = graph_values(joint, values)
    found = step_in_pieces(pieces_of(joint, count), values)
    for end, one, other in zip(joint.outputs, found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-12), end


@pytest.mark.parametrize("name", ["a row", "halves", "added", "added to zeros", "a bias once"])
def test_all_pieces_run_the_same_ops(name: str) -> None:
    joint, _ = model_and_values(name, 6)
    times = find_run_times(plain := without_uses(joint), 3 if name == "a row" else 2)
    graphs = [in_pieces(plain, times, index) for index in range(times.count)]
    targets = [[node.target for node in graph.graph.nodes] for graph in graphs]
    assert all(one == targets[0] for one in targets)


def test_products_run_in_pieces() -> None:
    joint, _ = model_and_values("tokens", 8)
    first = cut_batch(joint, 4)
    graphs = (first, *first.others)
    products = [n for n in graphs[0].graph.nodes if is_product(n)]
    assert len(products) == 6
    assert all(n.meta["runs"] == "piece" and repeats(n) == 4 for n in products)
    assert {len(g.graph.nodes) for g in graphs} == {len(graphs[0].graph.nodes)}


class Returned(nn.Module):
    """The loss and what a layer returns: one over steps, batch first or not, or a cell step by step, states stacked."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.layer, Paired):
            out = self.layer(x)
        elif isinstance(self.layer, nn.RNNBase):
            out, _ = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        else:
            state: Any = None
            states = []
            for step in x.unbind(1):
                state = self.layer(step, state)
                states.append(state[0] if isinstance(state, tuple) else state)
            out = torch.stack(states)
        return out.square().mean(), out


class Paired(nn.Module):
    """A product of three, and slopes of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.slopes = nn.Bilinear(4, 4, 6), nn.PReLU(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slopes(self.pair(x, x.cos()).movedim(-1, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True),
        lambda: nn.GRU(4, 6, bidirectional=True),
        lambda: nn.GRUCell(4, 6),
        lambda: nn.LSTMCell(4, 6),
        Paired,
    ],
    ids=["lstm", "gru", "gru cell", "lstm cell", "bilinear, prelu"],
)
def test_products_of_unusual_layers_run_in_pieces(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Returned(build()).double(), torch.randn(6, 3, 4, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    values = reference_inputs(joint, model, [x], seed=1)
    tangents = [i for i, spec in enumerate(joint.inputs) if spec.kind == "tangent"]
    values[tangents[1]].zero_()  # in pieces the loss alone gets a gradient
    batch = cut_batch(joint, 4)
    assert all(repeats(n) == 4 for n in batch.graph.nodes if is_product(n))
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    given = [known[spec.kind, spec.name] for spec in batch.inputs]
    wanted, _ = graph_values(joint, values)
    for one, other in zip(step_in_pieces([batch, *batch.others], given), wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_loss_alone_gets_a_gradient() -> None:
    joint, values = model_and_values("loss and logits", 6)
    tangents = [i for i, spec in enumerate(joint.inputs) if spec.kind == "tangent"]
    wanted_values = list(values)
    wanted_values[tangents[1]] = torch.zeros_like(values[tangents[1]])
    wanted, _ = graph_values(joint, wanted_values)
    found = step_in_pieces((cut := cut_batch(joint, 3), *cut.others), values)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None and torch.allclose(one, other, rtol=1e-11, atol=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.statistics, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.statistics(self.first(x))).square().mean()


def test_what_needs_the_whole_batch_is_named() -> None:
    joint = canonical_capture(Normed(), (torch.randn(8, 4),), {}).joint
    with pytest.raises(
        InfeasibleError, match=r"micro_batches=2: aten.* \(statistics, .*\) needs the whole batch"
    ):
        cut_batch(joint, 2)


class OverTheBatch(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(4, 6), nn.Linear(6, 2), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.last(self.first(x)))


def dice(z: torch.Tensor) -> torch.Tensor:
    return (2 * z.sum() + 1) / (z.square().sum() + 1)


@pytest.mark.parametrize(
    "loss", [lambda z: z.logsumexp(0).sum(), torch.linalg.vector_norm, dice, lambda z: z.median()]
)
def test_a_loss_over_the_whole_batch_is_named_and_not_a_layer(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    joint = canonical_capture(OverTheBatch(loss), (torch.randn(8, 4),), {}).joint
    with pytest.raises(InfeasibleError) as error:
        cut_batch(joint, 2)
    # The module is the model itself, so only the line is given.
    assert re.search(
        r"micro_batches=2: aten\.\S+ \(test_in_pieces\.py:\d+\) needs the whole batch", str(error.value)
    )


def test_more_pieces_than_samples_are_refused() -> None:
    joint, _ = model_and_values("tokens", 3)
    with pytest.raises(InfeasibleError, match=r"micro_batches=4: .* is 3\n  try: micro_batches=3"):
        cut_batch(joint, 4)


class RootOfMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean().sqrt()


def test_a_loss_that_is_no_sum_over_samples_is_named() -> None:
    """Every piece's gradients need the root of the whole sum: not the products, the root is in the way."""
    joint = canonical_capture(RootOfMean().double(), (torch.randn(6, 4, dtype=torch.float64),), {}).joint
    with pytest.raises(InfeasibleError, match=r"(?s)micro_batches=2: aten.sqrt .*try: .* mean over samples"):
        cut_batch(joint, 2)


class Shifted(Tokens):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        after = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), after.flatten())


@pytest.mark.parametrize(("batch", "tokens", "count", "wanted"), [
    (6, 6, 3, (2, 2, 2)),
    (8, 8, 4, (2, 2, 2, 2)),
    (8, 32, 4, (2, 2, 2, 2)),
    (10, 10, 4, (3, 3, 2, 2)),
])  # fmt: skip
def test_pieces_are_even_whatever_else_is_as_long(
    batch: int, tokens: int, count: int, wanted: tuple[int, ...]
) -> None:
    """Tokens of labels that are shifted by one could be cut 1, 2, 3; the batch is not, where it is as long."""
    joint = canonical_capture(Shifted(), (torch.zeros(batch, tokens, dtype=torch.long),), {}).joint
    plain = without_uses(joint)
    times = find_run_times(plain, count)
    cut = {layout.split_sizes(shape, times.mesh, dim) for shape, layout, dim in times.cut(plain)}
    # Of a batch, or of its tokens put one after the other.
    assert {tuple(size * batch // sum(sizes) for size in sizes) for sizes in cut} == {wanted}
