"""A long cache of few heads: it is split by its sequence, each rank attends to its part, and what they find is merged;
tokens and cache are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autoshard import MeshSpec, find_plan, verify
from passes.layout.layout import KEYS
from tests.api.programs import full, parallel
from tests.ranks import RankPool

WORDS, WIDTH, HEADS, SIZE = 64, 32, 4, 8
LONG = 16_384


def words(tokens: int, rows: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def llama(groups: int) -> nn.Module:
    """Two layers in which that many heads of keys are seen by all heads of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        max_position_embeddings=LONG,
    )
    return LlamaForCausalLM(config).double().eval()


def llama_call(model: Any, tokens: int, rows: int) -> tuple[tuple[()], dict[str, Any]]:
    """Tokens behind 12 that a static cache has."""
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=LONG)
    with torch.no_grad():
        model(words(12, rows), past_key_values=cache)
    return (), {"input_ids": words(tokens, rows), "past_key_values": cache}


@pytest.mark.parametrize(
    ("ranks", "groups", "rows", "tokens", "factor", "dim"),
    [
        (2, 1, 1, 1, KEYS, 2),
        (4, 2, 1, 1, KEYS, 2),
        (2, 1, 1, 16, KEYS, 2),
        (2, 2, 1, 1, "g", 1),
        (2, 1, 2, 1, "b", 0),
    ],
)
def test_it_is_split_by_its_sequence_where_heads_and_rows_are_too_few(
    ranks: int, groups: int, rows: int, tokens: int, factor: str, dim: int
) -> None:
    """On the nominal CPU. A rank then has its share of the cache and of its new value."""
    model = llama(groups)
    call = llama_call(model, tokens, rows)
    plan = find_plan(model, MeshSpec({"tp": ranks}), call, inference=True, profile="cpu", backend="eager")
    attentions = [record for record in plan.records if record.name.startswith("attention")]
    assert [[split.factor for split in record.splits] for record in attentions] == [[factor]] * 2
    caches = [record for record in plan.records if record.text.endswith((".keys", ".values"))]
    held = [record.layouts.results[0].dims for record in caches]
    assert held == [tuple(("tp",) if d == dim else () for d in range(4))] * 4
    assert plan.memory is not None
    part = 4 * rows * groups * LONG * SIZE * 8 // ranks
    assert part < plan.memory.by_kind["inputs"] < part + 256  # beside words, counts and angles
    assert not [one for one in plan.collectives if one.nbytes >= part // 4]
    with torch.no_grad():
        report = verify(model, plan, call)
    assert report.ok and report.max_error < 1e-6, str(report)  # its norms are computed in float32


class Cache:
    """Keys and values of one head, changed in place, and how many there are. parts: of which it has one."""

    def __init__(self, length: int, parts: int = 1) -> None:
        self.keys, self.values = (
            torch.zeros(1, 1, length // parts, SIZE, dtype=torch.float64) for _ in range(2)
        )
        self.seen = torch.zeros((), dtype=torch.int64)


class Decoder(nn.Module):
    """A layer of attention over a cache of `length`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.length = length
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * SIZE, bias=False) for n in (HEADS, 1, 1))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.double().eval()

    def forward(self, words: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x = self.words(words)
        heads = lambda y: y.unflatten(-1, (-1, SIZE)).transpose(1, 2)
        places = torch.arange(words.shape[1]) + cache.seen
        cache.keys.index_copy_(2, places, heads(self.k(x)))
        cache.values.index_copy_(2, places, heads(self.v(x)))
        cache.seen += words.shape[1]
        seen = torch.arange(self.length) <= places[:, None]
        mixed = F.scaled_dot_product_attention(
            heads(self.q(x)), cache.keys, cache.values, seen, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2)), cache


def filled(length: int, seen: int) -> Cache:
    """With anything behind what was seen."""
    cache, generator = Cache(length), torch.Generator().manual_seed(seen)
    cache.keys, cache.values = (
        torch.randn(1, 1, length, SIZE, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    cache.seen += seen
    return cache


PARTS = {"in_placements": {"args[1].keys": [Shard(2)], "args[1].values": [Shard(2)]}}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("tokens", "seen"), [(1, 0), (3, 30), (1, 32), (3, 61)])
def test_tokens_go_where_their_place_is(ranks: int, tokens: int, seen: int) -> None:
    """Of 64 places of a cache that ranks are given in parts: of three tokens two are of one rank, one of the next.
    Some ranks have no place that is seen."""
    length = 64
    model = Decoder(length)
    given: dict[str, Any] = {"profile": "cpu", "backend": "eager", **PARTS}
    call = (words(tokens), Cache(length, ranks))
    plan = find_plan(model, MeshSpec({"tp": ranks}), call, inference=True, **given)
    (attention,) = (record for record in plan.records if record.name.startswith("attention"))
    assert [split.factor for split in attention.splits] == [KEYS]
    with torch.no_grad():
        report = verify(model, plan, (words(tokens), filled(length, seen)))
    assert report.ok and report.max_error < 1e-12, str(report)


def decoded(model: nn.Module) -> tuple[list[Tensor], Cache]:
    """Logits of a prompt and of three tokens."""
    cache, found = Cache(LONG), list[Tensor]()
    with torch.no_grad():
        for tokens in (3, 1, 1, 1):
            logits, cache = model(words(tokens), cache)
            found.append(logits)
    return found, cache


def parallel_decoded(rank: int, backend: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Layouts are those of a token."""
    example = words(1), Cache(LONG)
    model = parallel(
        Decoder(LONG), (("tp", 2),), example, inference=True, tune="first", profile="cpu", backend=backend
    )
    found, cache = decoded(model.eval())
    both = cache.keys, cache.values
    assert all(isinstance(one, DTensor) for one in both)
    return found, [full(one) for one in (*both, cache.seen)], [str(one.placements) for one in both]  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tokens_and_cache_are_those_of_one_process(backend: str, ranks: RankPool) -> None:
    wanted, cache = decoded(Decoder(LONG))
    for found, state, placements in ranks.run(parallel_decoded, backend, world=2):
        assert placements == ["(Shard(dim=2),)"] * 2
        for one, other in zip([*found, *state], [*wanted, cache.keys, cache.values, cache.seen], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
