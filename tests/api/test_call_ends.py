"""Calls without gradients: a cache is split as the plan has it, on one device it is counted so, and its values are
those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autoshard import MeshSpec, Plan, ShardingError, find_plan, verify
from autoshard.runtime.module import dispatcher_of
from benchmarks.generation import CASES, Row, measured
from tests.api.programs import device_mesh, full, parallel
from tests.profiles import slow_compute
from tests.ranks import RankPool

WIDTH, HEADS, WORDS, LONGEST, ROWS = 16, 4, 32, 8, 4


class Cache:
    """Keys and values of at most `LONGEST` tokens, changed in place, and how many there are."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.keys, self.values = (
            torch.zeros(ROWS, HEADS, LONGEST, WIDTH // HEADS, dtype=torch.float64, device=device)
            for _ in range(2)
        )
        self.seen = torch.zeros((), dtype=torch.int64, device=device)


class Decoder(nn.Module):
    """A layer of attention over a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mix, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x = F.dropout(self.words(words), 0.5, self.training)
        heads = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        places = torch.arange(words.shape[1], device=cache.device) + cache.seen
        cache.keys.index_copy_(2, places, heads(self.k(x)))
        cache.values.index_copy_(2, places, heads(self.v(x)))
        cache.seen += words.shape[1]
        seen = torch.arange(LONGEST, device=cache.device) <= places[:, None]
        mixed = F.scaled_dot_product_attention(heads(self.q(x)), cache.keys, cache.values, seen)
        return self.out(self.mix(mixed.transpose(1, 2).flatten(2))), cache


def decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder().double()


def words(tokens: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


PINS = {"[qkv].weight": [Shard(0)], "mix.weight": [Shard(1)]}
"""As in tensor parallelism: heads are split."""


def planned(tokens: int, device: str = "cpu", **options: Any) -> Plan:
    given: dict[str, Any] = {"profile": slow_compute(), "backend": "eager", "constraints": PINS} | options
    return find_plan(decoder(), MeshSpec({"tp": 2}), (words(tokens), Cache(device)), inference=True, **given)


def test_a_rank_holds_its_part_of_weights_and_cache_and_nothing_of_a_backward() -> None:
    """All weights and the cache are split; its new values are besides."""
    plan, weight = planned(1), WIDTH * WIDTH * 8
    cache = 2 * ROWS * LONGEST * WIDTH * 8
    assert plan.memory is not None
    found = plan.memory.by_kind
    assert found["parameters"] == (4 * weight + 2 * WORDS * WIDTH * 8) // 2
    number = 8
    assert found["inputs"] == cache // 2 + ROWS * number + number  # words, and how many were seen
    assert found["working"] == cache // 2 + number
    assert found["gradients"] == found["optimizer"] == found["kept"] == 0
    assert planned(1, "meta").to_json() == plan.to_json()  # a cache that is never whole anywhere


class Growing(Decoder):
    """Leaves a longer cache in the object."""

    def forward(self, words: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x = self.words(words)
        heads = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        cache.keys = torch.cat([cache.keys, heads(self.k(x))], 2)
        cache.values = torch.cat([cache.values, heads(self.v(x))], 2)
        mixed = F.scaled_dot_product_attention(heads(self.q(x)), cache.keys, cache.values)
        return self.out(self.mix(mixed.transpose(1, 2).flatten(2))), cache


def test_a_cache_that_is_left_in_an_object_is_not_gathered() -> None:
    options: dict[str, Any] = {"profile": slow_compute(), "backend": "eager", "constraints": PINS}
    call = words(1), Cache()
    plan = find_plan(Growing().double(), MeshSpec({"tp": 2}), call, inference=True, **options)
    cache = ROWS * (LONGEST + 1) * WIDTH * 8
    assert all(collective.nbytes < cache // 2 for collective in plan.collectives)


def test_it_is_planned_as_evaluated_and_verified() -> None:
    """Dropout is off though the model trains."""
    model, plan = decoder(), planned(3)
    assert model.training and not any("uniform" in one.name for one in plan.planned.nodes)
    with torch.no_grad():
        assert verify(model.eval(), plan, (words(3), Cache())).ok


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"stages": "tp"}], ids=str)
def test_what_divides_training_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ShardingError, match="inference=True plans calls without a backward"):
        planned(1, constraints=None, **options)


def decoded(model: nn.Module) -> tuple[list[Tensor], Cache]:
    """Logits of a prompt and of three tokens."""
    cache, found = Cache(), list[Tensor]()
    with torch.no_grad():
        for tokens in (3, 1, 1, 1):
            logits, cache = model(words(tokens), cache)
            found.append(logits)
    return found, cache


def parallel_decoded(
    rank: int, example: int | None, found_before: bool
) -> tuple[list[Tensor], list[Tensor], list[str], int]:
    """example: tokens of the call that decides layouts; None: the first one. found_before: its plan is given."""
    given = None if example is None else (words(example), Cache())
    options: dict[str, Any] = {"plan": planned(1)} if found_before else {"constraints": PINS}
    model = parallel(decoder(), (("tp", 2),), given, inference=True, tune="first", **options).eval()
    found, cache = decoded(model)
    assert isinstance(cache.keys, DTensor) and isinstance(cache.values, DTensor)
    placements = [str(one.placements) for one in (cache.keys, cache.values)]
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    programs = sum(map(len, dispatcher.executables.values()))
    return found, [full(one) for one in (cache.keys, cache.values, cache.seen)], placements, programs


@pytest.mark.parametrize(("example", "found_before"), [(None, False), (1, False), (1, True)])
def test_tokens_and_cache_are_those_of_one_process(
    example: int | None, found_before: bool, ranks: RankPool
) -> None:
    wanted, cache = decoded(decoder().eval())
    for found, state, placements, programs in ranks.run(parallel_decoded, example, found_before, world=2):
        for one, other in zip([*found, *state], [*wanted, cache.keys, cache.values, cache.seen], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert placements == ["(Shard(dim=1),)"] * 2
        assert programs <= 3


def generated(rank: int, case: tuple[str, str, str], tokens: int) -> Row:
    return measured(*case, tokens, 0, inference=True)


@pytest.mark.parametrize(
    ("case", "tokens", "world"),
    [
        (("Llama", "static", "greedy"), 5, 2),
        *(
            pytest.param(case, 16, world, marks=pytest.mark.slow, id=f"{' '.join(case)} {world}")
            for case in CASES
            for world in (2, 4)
        ),
    ],
)
def test_models_of_transformers_generate_what_one_process_does(
    case: tuple[str, str, str], tokens: int, world: int, ranks: RankPool
) -> None:
    """In three programs at most; those of a main model and an assistant see one token, or several, at once."""
    for row in ranks.run(generated, case, tokens, world=world):
        assert row.equal == row.tokens > 0
        assert row.programs <= (5 if case[2] == "assisted" else 3), row
        assert row.captures <= row.programs + 1, row


def parallel_in_place(rank: int) -> tuple[bool, bool]:
    """What the call changes in place is what it returns, and a cache that comes as a DTensor stays that tensor."""
    model = parallel(decoder(), (("tp", 2),), constraints=PINS, inference=True, tune="first").eval()
    cache = Cache()
    with torch.no_grad():
        _, returned = model(words(3), cache)
        keys = cache.keys
        _, again = model(words(1), cache)
    return returned.keys is cache.keys, again.keys is keys


def test_what_is_changed_in_place_is_the_tensor_that_is_returned(ranks: RankPool) -> None:
    assert ranks.run(parallel_in_place, world=2) == [(True, True)] * 2


class Counting(nn.Module):
    """Adds to a tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen += x.detach()
        return self.mix(x).sum()


def changed_shards(rank: int) -> list[Tensor]:
    """A part that a rank passes as one of the whole, and a DTensor, after two calls that train."""
    mesh, part = device_mesh((("dp", 2),)), torch.zeros(2, 3)
    whole = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    for placements, seen in (([None, [Shard(0)]], part), (None, whole)):
        model = parallel(Counting(), (("dp", 2),), in_placements=placements, tune="first")
        for step in (1.0, 2.0):
            model(torch.full((4, 3), step), seen).backward()
    return [part, full(whole)]


def test_what_ranks_have_parts_of_is_changed_in_place(ranks: RankPool) -> None:
    for part, whole in ranks.run(changed_shards, world=2):
        assert torch.equal(part, torch.full((2, 3), 3.0)) and torch.equal(whole, torch.full((4, 3), 3.0))
