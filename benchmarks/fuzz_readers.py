"""Every reader, with files that were damaged: whatever is refused is refused by name, what is accepted can be used.

    python -m benchmarks.fuzz_readers --cases 10000

Prints, per kind of file, how many were refused, accepted, raised something raw, or crashed after they were accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard import AutoshardError, MeshSpec, Plan, Profile, find_plan, verify
from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices

SAMPLES = Path(__file__).parent.parent / "tests" / "cost_model" / "samples"
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"))
VALUES = (*NUMBERS, None, True, "", "x", "\0", "\udcff", "{0:>9999999999}", "{}", [], {}, [[[]]], {"x": {}})
TEXTS = (
    "nan",
    "-1",
    "1e999",
    "9" * 5000,
    "\t",
    "\0",
    "[" * 3000,
    "{" * 3000,
    "inf",
    "é",
    "#",
    "|",
    "0x10",
    "",
)

Case = tuple[str, str]
"""What became of a damaged file, and of which error."""


def damaged_json(data: Any, rng: random.Random) -> bytes:
    """`data` with one to three values replaced, removed, doubled or swapped."""
    copy = json.loads(json.dumps(data))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(copy))
        if places:
            _change(*rng.choice(places), rng, places)
    return json.dumps(copy).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        holder = pending.pop()
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, inner in pairs:
            found.append((holder, key))
            if isinstance(inner, (dict, list)):
                pending.append(inner)
    return found


def _change(holder: Any, key: Any, rng: random.Random, places: Sequence[tuple[Any, Any]]) -> None:
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1:
            other, at = rng.choice(places)
            if (isinstance(other, dict) and at not in other) or (
                isinstance(other, list) and at >= len(other)
            ):
                return
            holder[key] = json.loads(json.dumps(other[at]))
        case 2 if isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        case 3 if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((2, -1, 10**9, 0.5)) + rng.choice((0, 1))
        case _:
            holder[key] = rng.choice(VALUES)


def damaged_bytes(text: bytes, rng: random.Random) -> bytes:
    """`text` with bytes flipped, cut, repeated, or a word replaced."""
    content = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) or 1)
        match rng.randrange(5):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1:
                del content[at:]
            case 2:
                content[at:at] = content[at : at + rng.randint(1, 200)]
            case 3:
                del content[at : at + rng.randint(1, 40)]
            case _:
                words = bytes(content).split(b" ")
                words[rng.randrange(len(words))] = rng.choice(TEXTS).encode()
                content = bytearray(b" ".join(words))
    return bytes(content)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def small_plan() -> Plan:
    options: Mapping[str, Any] = {"profile": "h100", "backend": "eager", "memory_limit": "1GB"}
    return find_plan(small_model(), MeshSpec({"a": 2, "b": 2}), (torch.zeros(8, 6),), **options)


def use_plan(path: Path) -> None:
    plan = Plan.load(path)
    use = [plan.explain, plan.to_text, plan.to_networkx, lambda: plan.diff(plan), lambda: plan.parameters]
    use += [
        lambda suffix=s: plan.draw(path.with_suffix(suffix)) for s in (".svg", ".html", ".dot", ".graphml")
    ]
    for action in use:
        _used(action)
    _used(lambda: verify(small_model(), plan, (torch.zeros(8, 6),)))


def _used(action: Callable[[], Any]) -> None:
    """An accepted file: a named error is an answer, anything else a crash."""
    try:
        action()
    except AutoshardError:
        pass
    except Exception as error:
        raise CrashError(f"{type(error).__name__}: {str(error)[:120]}") from error


class CrashError(Exception):
    """What was accepted could not be used."""


def use_profile(path: Path) -> None:
    price(Profile.load(path))


def use_benchmark(path: Path) -> None:
    price(Profile.from_nccl_tests(path, rank_stride=1))


def price(profile: Profile) -> None:
    mesh = MeshSpec({"a": 2, "b": 4}, "cuda")

    def priced() -> None:
        collectives, compute = CollectivePrices(profile, mesh), ComputePrices(profile, "cuda")
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            collectives.seconds(kind, ("a",), 1000), collectives.seconds(kind, ("a", "b"), 10**9)
        compute.memory_seconds(10**6)

    for action in (profile.summary, profile.to_json, profile.hash, priced):
        _used(action)


def outcome(use: Callable[[Path], None], content: bytes, path: Path) -> Case:
    path.write_bytes(content)
    try:
        use(path)
    except AutoshardError as error:
        return ("refused", "") if "\n  try: " in str(error) else ("raw", f"no remedy: {str(error)[:150]}")
    except CrashError as error:
        return "crashed", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {str(error)[:120]}"
    return "accepted", ""


def fuzz(kind: str, cases: int, seed: int, folder: Path) -> Counter[Case]:
    """What became of `cases` damaged files of one kind, always the same for a seed."""
    rng = random.Random(f"{kind} {seed}")
    found: Counter[Case] = Counter()
    samples = SOURCES[kind]()
    for _ in range(cases):
        text, use = rng.choice(samples)
        json_like = text.lstrip().startswith(b"{")
        content = (
            damaged_json(json.loads(text), rng)
            if json_like and rng.random() < 0.7
            else damaged_bytes(text, rng)
        )
        found[outcome(use, content, folder / "damaged.json")] += 1
    return found


Sample = tuple[bytes, Callable[[Path], None]]


def _plans() -> list[Sample]:
    return [(json.dumps(small_plan().to_json()).encode(), use_plan)]


def _profiles() -> list[Sample]:
    return [(Profile.named(name).to_json().encode(), use_profile) for name in Profile.names()]


def _benchmarks(names: Sequence[str]) -> Callable[[], list[Sample]]:
    return lambda: [((SAMPLES / name).read_bytes(), use_benchmark) for name in names]


SOURCES: Mapping[str, Callable[[], list[Sample]]] = {
    "plans": _plans,
    "profiles": _profiles,
    "nccl-tests text": _benchmarks(
        ["all_reduce_perf.txt", "all_gather_16.txt", "broadcast.txt", "sweep_prefixed.log"]
    ),
    "nccl-tests JSON": _benchmarks(["all_gather_one_process.json"]),
    "stas00 tables": _benchmarks(
        ["all_reduce_bench.txt", "all_reduce_bench_table.md", "torch_dist_bench.txt"]
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=10_000, help="damaged files of each kind (default 10000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(SOURCES), default=list(SOURCES))
    arguments = parser.parse_args(argv)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kinds:
            found = fuzz(kind, arguments.cases, arguments.seed, Path(folder))
            totals = Counter[str]()
            for (what, _), count in found.items():
                totals[what] += count
            bad += totals["raw"] + totals["crashed"]
            print(
                kind,
                ", ".join(f"{totals[w]} {w}" for w in ("refused", "accepted", "raw", "crashed")),
                flush=True,
            )
            for (what, text), count in found.most_common():
                if what in ("raw", "crashed"):
                    print(f"  {what} {count}: {text}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
