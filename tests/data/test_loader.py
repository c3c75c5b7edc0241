"""Every rank's batches, made in this process, against the whole batches cut by hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.data import BatchSampler, Dataset, RandomSampler

from autoshard.data.loader import ArrayDataset, Order, PartLoader, rank_loader
from autoshard.data.rank_sampler import BatchSplit
from cost_model.errors import PlanError, ShardingError
from cost_model.mesh import MeshSpec

MESH = MeshSpec({"dp": 2, "sp": 3})
SPLIT = [Shard(0), Shard(2)]
LABELS = [Shard(0), Replicate()]
COUNT, HEIGHT, WIDTH = 23, 3, 11


def images() -> Tensor:
    return torch.arange(COUNT * HEIGHT * WIDTH).view(COUNT, HEIGHT, WIDTH)


class Whole(Dataset[tuple[Tensor, int]]):
    """Samples that can only be read whole, with a Python number each."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return images()[index], 100 + index


class Counting:
    """A partial dataset of dicts that notes the elements read."""

    def __init__(self) -> None:
        self.shapes = {"x": (HEIGHT, WIDTH), "y": ()}
        self.elements = 0

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int, slices: Any) -> dict[str, Any]:
        x = images()[index][slices["x"]]
        self.elements += x.numel()
        return {"x": x, "y": 100 + index}


def loaders(dataset: Any, placements: Any, order: Order, mesh: MeshSpec = MESH) -> list[PartLoader]:
    return [rank_loader(dataset, mesh, rank, placements, order) for rank in range(mesh.device_count)]


def whole_batches(order: Order, epoch: int) -> list[list[int]]:
    """Sample numbers of every batch, by torch's own samplers."""
    generator = torch.Generator().manual_seed(order.seed + epoch)
    samples = RandomSampler(range(COUNT), generator=generator) if order.shuffle else range(COUNT)
    return list(BatchSampler(samples, order.batch_size, order.drop_last))


COLUMNS = [(0, 4), (4, 8), (8, 11)]  # 11 columns over 3 ranks, as torch.chunk splits them


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize(
    "order",
    [Order(8, shuffle=True, seed=5, drop_last=True), Order(9), Order(5, shuffle=True), Order(64)],
    ids=str,
)
def test_parts_of_whole_samples_make_up_the_batch(order: Order, epoch: int) -> None:
    batches = whole_batches(order, epoch)
    for rank, loader in enumerate(loaders(Whole(), [SPLIT, LABELS], order)):
        loader.set_epoch(epoch)
        got = list(loader)
        assert len(got) == len(loader) == len(batches)
        lo, hi = COLUMNS[rank % 3]
        for (x, y), samples in zip(got, batches, strict=True):
            # Two ranks: the first takes half, rounded up.
            half = -(-len(samples) // 2)
            mine = samples[:half] if rank < 3 else samples[half:]
            assert torch.equal(x, images()[mine][:, :, lo:hi])
            assert x.untyped_storage().nbytes() == x.numel() * 8
            assert y.tolist() == [100 + i for i in mine]


def test_parts_are_all_that_is_read() -> None:
    order = Order(6, {0: [4, 2], 2: [7, 0, 4]}, drop_last=True)
    placements = {"x": SPLIT, "y": LABELS}
    for rank in range(6):
        data = Counting()
        lo, hi = [(0, 7), (7, 7), (7, 11)][rank % 3]
        mine = [slice(0, 4), slice(4, 6)][rank // 3]
        for start, batch in zip((0, 6, 12), rank_loader(data, MESH, rank, placements, order), strict=True):
            samples = list(range(start, start + 6))[mine]
            assert torch.equal(batch["x"], images()[samples][:, :, lo:hi])
            assert batch["y"].tolist() == [100 + i for i in samples]
        assert data.elements == 3 * len(range(6)[mine]) * HEIGHT * (hi - lo)


def test_arrays_of_any_kind_are_cut_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, images().numpy())
    mapped = np.load(path, mmap_mode="r")
    labels = torch.arange(COUNT).double()
    order = Order(6, drop_last=True)
    tuples = loaders(ArrayDataset(mapped, labels), [SPLIT, LABELS], order)
    dicts = loaders(ArrayDataset(x=images(), y=labels.numpy()), {"x": SPLIT, "y": LABELS}, order)
    for rank, (one, two) in enumerate(zip(tuples, dicts, strict=True)):
        lo, hi = COLUMNS[rank % 3]
        rows = slice(0, 3) if rank < 3 else slice(3, 6)
        x, y = next(iter(one))
        assert torch.equal(x, images()[rows, :, lo:hi]) and torch.equal(y, labels[rows])
        batch = next(iter(two))
        assert torch.equal(batch["x"], x) and torch.equal(batch["y"], y)
    whole = ArrayDataset(mapped, labels)[4]
    assert torch.equal(whole[0], images()[4]) and whole[1] == 4


def test_ranks_without_a_sample_get_an_empty_batch() -> None:
    mesh = MeshSpec({"dp": 4})
    got = [next(iter(loader)) for loader in loaders(Whole(), Shard(0), Order(3, drop_last=True), mesh)]
    assert [x.shape for x, _ in got] == [(1, HEIGHT, WIDTH)] * 3 + [(0, HEIGHT, WIDTH)]
    assert [y.tolist() for _, y in got] == [[100], [101], [102], []]


def test_random_parts_of_a_short_batch_are_in_proportion() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 5)))
        whole = sum(sizes)
        if not whole:
            continue
        split = BatchSplit(whole, (len(sizes),), sizes)
        assert split.parts(whole) == sizes
        length = rng.randint(0, whole)
        parts = split.parts(length)
        assert sum(parts) == length and all(
            0 <= part <= size for part, size in zip(parts, sizes, strict=True)
        )
        assert all(abs(p - s * length / whole) < 1 for p, s in zip(parts, sizes, strict=True))


class Noisy(Dataset[Tensor]):
    """Random samples: torch's, numpy's and Python's numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_are_the_same_on_every_mesh_and_leave_the_callers_numbers(workers: int) -> None:
    order = Order(4, shuffle=True, drop_last=True)
    torch.manual_seed(1)
    alone = list(rank_loader(Noisy(), MeshSpec({"x": 1}), 0, Shard(0), order))
    assert len({value.item() for batch in alone for value in batch.flatten()}) == 24
    options = {"num_workers": workers}
    group = MeshSpec({"dp": 2, "tp": 2})
    placed = [Shard(0), Replicate()]
    torch.manual_seed(2)
    ranks = [list(rank_loader(Noisy(), group, r, placed, order, options=options)) for r in range(4)]
    for k, batch in enumerate(alone):
        assert torch.equal(torch.cat([ranks[0][k], ranks[2][k]]), batch)
        assert torch.equal(ranks[0][k], ranks[1][k]) and torch.equal(ranks[2][k], ranks[3][k])
    loader = rank_loader(Noisy(), group, 0, placed, order)
    iterator = iter(loader)
    next(iterator)
    states = torch.get_rng_state(), random.getstate()
    next(iterator)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    loader.set_epoch(1)
    assert not torch.equal(next(iter(loader)), ranks[0][0])


def drawn(loader: PartLoader, count: int | None = None) -> list[list[int]]:
    return [y.tolist() for _, y in itertools.islice(loader, count)]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_resumes_where_it_was_and_on_another_mesh(stop: int) -> None:
    """Whole batches of a single rank; the state is taken while batch `stop` is in use, workers being ahead."""
    order = Order(5, shuffle=True, seed=2, drop_last=True)
    one = MeshSpec({"x": 1})
    straight = rank_loader(Whole(), one, 0, Shard(0), order)
    wanted = [drawn(straight), drawn(straight)]
    assert wanted[0] != wanted[1] and straight.epoch == 2

    loader = rank_loader(Whole(), one, 0, Shard(0), order, options={"num_workers": 1})
    for done, _ in enumerate(loader, start=1):
        if done == stop:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, stop)
    resumed = loaders(Whole(), [[Shard(0), Replicate()]] * 2, order)
    for rank in resumed:
        rank.load_state_dict(state)
        assert rank.state_dict() == state
        rank.set_epoch(0)
    first, second = (drawn(resumed[rank]) for rank in (0, 3))
    assert [a + b for a, b in zip(first, second, strict=True)] == wanted[0][stop:]
    # The epochs after that are whole.
    first, second = (drawn(resumed[rank]) for rank in (0, 3))
    assert [a + b for a, b in zip(first, second, strict=True)] == wanted[1]


def test_an_epoch_left_early_starts_again() -> None:
    loader = rank_loader(Whole(), MeshSpec({"x": 1}), 0, Shard(0), Order(5))
    assert drawn(loader, 2) == drawn(loader, 2)
    loader.set_epoch(4)
    assert loader.state_dict()["batch"] == 0


@pytest.mark.parametrize(
    ("placements", "order", "message"),
    [
        (
            [SPLIT, [Replicate(), Replicate()]],
            Order(8),
            "placements split dim 0 of a batch's tensors over different axes: [['dp'], []]",
        ),
        ([SPLIT, None], Order(8), "different axes: [['dp'], []]"),
        ([SPLIT, [Shard(0), Partial()]], Order(8), "placements[1] is Partial over axis 'sp'"),
        ([SPLIT, [Shard(0), Shard(-1)]], Order(8), "placements[1] splits dim -1, counted from the end"),
        ([Shard(0), LABELS], Order(8), "placements[0] has 1 placements; the mesh has 2 axes"),
        ([SPLIT, LABELS], Order(0), "batch_size is 0"),
        (
            [SPLIT, LABELS],
            Order(8, {0: [3, 4]}),
            "sizes[0] = [3, 4] adds up to 7; dim 0 of a batch is 8 long",
        ),
        ([SPLIT, LABELS], Order(8, {1: [3]}), "sizes has dim 1, which no tensor of a batch is split in"),
        ([SPLIT, LABELS], Order(40, drop_last=True), "23 samples, fewer than batch_size 40"),
        (
            [SPLIT, LABELS],
            Order(12),
            "the last batch has 11 samples, [6, 5] on the ranks that split it; a whole one has 12, [6, 6]",
        ),
    ],
)
def test_bad_arguments_are_named(placements: Any, order: Order, message: str) -> None:
    with pytest.raises(ShardingError) as caught:
        rank_loader(Whole(), MESH, 0, placements, order)
    assert message in str(caught.value)


def test_bad_batches_and_datasets_are_named() -> None:
    order = Order(8, {2: [5, 5, 5]}, drop_last=True)
    message = r"sizes\[2\] = \[5, 5, 5\] adds up to 15; dim 2 of args\[0\] of a batch is 11 long"
    with pytest.raises(ShardingError, match=message):
        next(iter(rank_loader(Whole(), MESH, 0, [SPLIT, LABELS], order)))
    with pytest.raises(ShardingError, match=message):
        rank_loader(ArrayDataset(images(), torch.arange(COUNT)), MESH, 0, [SPLIT, LABELS], order)
    with pytest.raises(ShardingError, match="placements has 3 entries for 2 tensors"):
        next(iter(rank_loader(Whole(), MESH, 0, [SPLIT, LABELS, LABELS], Order(8, drop_last=True))))
    with pytest.raises(ShardingError, match="dataset is a generator, which has no length"):
        rank_loader((i for i in range(3)), MESH, 0, SPLIT, Order(8))
    with pytest.raises(ShardingError, match=r"have lengths \{0: 3, 1: 4\}"):
        ArrayDataset(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ShardingError, match="by position or by name"):
        ArrayDataset()


def test_a_state_of_another_order_is_refused() -> None:
    one = rank_loader(Whole(), MESH, 0, [SPLIT, LABELS], Order(9))
    two = rank_loader(Whole(), MESH, 0, [SPLIT, LABELS], Order(9, seed=1))
    with pytest.raises(PlanError, match="the loader's state has seed 0; this loader has 1"):
        two.load_state_dict(one.state_dict())


NONE: list[Any] = [None, [], {}, {"a": 1}, {"epoch": None}, {"epoch": -1}, {"batch": 0.5}]


@pytest.mark.parametrize("state", NONE)
def test_what_is_no_state_is_refused(state: Any) -> None:
    loader = rank_loader(Whole(), MESH, 0, [SPLIT, LABELS], Order(9))
    good = loader.state_dict()
    given = {**good, **state} if isinstance(state, dict) and state.keys() <= good.keys() and state else state
    with pytest.raises(PlanError, match=r"^state is .*, and no loader's\n  try: "):
        loader.load_state_dict(given)
    assert loader.state_dict() == good
    with pytest.raises(ShardingError, match=r"^epoch is "):
        loader.set_epoch(1.5)  # type: ignore[arg-type]
