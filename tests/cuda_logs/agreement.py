"""Whether the NCCL calls of all ranks of a job fit together.

*Invariants* checked, each with its own message:

- A communicator's ranks are 0 .. size - 1, each in one process; a split has all ranks of its parent.
- Its ranks issue the same collectives in the same order: kind, count, type, operation, root.
- A send has a recv of the same count and type at its peer, in the order of both.
- The job ends even if every device runs its calls one after another, over all communicators, as issued: then
  no order in which NCCL may run them can hang.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tests.cuda_logs.logs import Call, Process

__all__ = ["Agreement", "Communicator", "check_logs"]


@dataclass(frozen=True)
class Communicator:
    """members: rank -> number of its process. made: "init" or "split"."""

    name: str
    made: str
    members: Mapping[int, int]

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Agreement:
    """problems: empty if all fits. kinds: calls of all ranks, by kind; messages are sends and recvs."""

    problems: tuple[str, ...]
    communicators: tuple[Communicator, ...]
    kinds: Mapping[str, int]

    @property
    def messages(self) -> int:
        return self.kinds.get("send", 0) + self.kinds.get("recv", 0)

    @property
    def collectives(self) -> int:
        return sum(self.kinds.values()) - self.messages

    def __str__(self) -> str:
        sizes = Counter((c.size, c.made) for c in self.communicators)
        made = ", ".join(
            f"{n} of {size} ranks by {how}" for (size, how), n in sorted(sizes.items(), reverse=True)
        )
        calls = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{len(self.communicators)} communicators ({made}), {calls}"


def check_logs(processes: Sequence[Process]) -> Agreement:
    """All invariants over the logs of one job."""
    problems: list[str] = []
    communicators = _communicators(processes, problems)
    calls = _calls_by_comm(processes)
    for name in calls:
        if name not in communicators:
            problems.append(f"calls on communicator {name}, which nobody made")
    for communicator in communicators.values():
        _check_collectives(communicator, calls[communicator.name], problems)
        _check_messages(communicator, calls[communicator.name], problems)
    if not problems:
        # Only calls that match can be run; of others the lines above say what is wrong.
        problems += _run_in_order(processes, communicators)
    kinds = Counter(call.kind for process in processes for call in process.calls)
    return Agreement(tuple(problems), tuple(communicators.values()), kinds)


def _communicators(processes: Sequence[Process], problems: list[str]) -> dict[str, Communicator]:
    sizes: dict[str, int] = {}
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for number, process in enumerate(processes):
        for init in process.inits:
            if sizes.setdefault(init.comm, init.size) != init.size:
                problems.append(
                    f"communicator {init.comm}: made with sizes {sizes[init.comm]} and {init.size}"
                )
            if init.rank in members[init.comm]:
                problems.append(f"communicator {init.comm}: rank {init.rank} is there twice")
            members[init.comm][init.rank] = number
    for name, size in sizes.items():
        if sorted(members[name]) != list(range(size)):
            problems.append(f"communicator {name}: ranks {sorted(members[name])} of {size} were made")
    found = {name: Communicator(name, "init", members[name]) for name in sizes}
    _add_splits(processes, found, problems)
    return found


def _add_splits(processes: Sequence[Process], found: dict[str, Communicator], problems: list[str]) -> None:
    """Parents come before their parts: a part's name begins with its parent's, so by length."""
    turns: dict[tuple[str, int], set[int]] = defaultdict(set)
    parts: dict[str, dict[int, int]] = defaultdict(dict)
    for number, process in enumerate(processes):
        for split in process.splits:
            turns[split.parent, split.turn].add(split.parent_rank)
            if split.comm:
                if split.key in parts[split.comm]:
                    problems.append(f"communicator {split.comm}: rank {split.key} is there twice")
                parts[split.comm][split.key] = number
    for name, members in sorted(parts.items(), key=lambda part: len(part[0])):
        if sorted(members) != list(range(len(members))):
            problems.append(f"communicator {name}: ranks {sorted(members)} were made by a split")
        found[name] = Communicator(name, "split", members)
    for (parent, turn), ranks in turns.items():
        if parent in found and ranks != set(found[parent].members):
            absent = sorted(set(found[parent].members) - ranks)
            problems.append(f"communicator {parent}: ranks {absent} do not join split {turn}")


def _calls_by_comm(processes: Sequence[Process]) -> dict[str, dict[int, list[Call]]]:
    """Communicator -> rank -> its calls, in order."""
    calls: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for process in processes:
        for call in process.calls:
            calls[call.comm][call.rank].append(call)
    return calls


def _check_collectives(
    communicator: Communicator, calls: Mapping[int, list[Call]], problems: list[str]
) -> None:
    sequences = {
        rank: [call for call in calls.get(rank, ()) if not call.is_message]
        for rank in sorted(communicator.members)
    }
    first = sequences.get(0, [])
    for rank, sequence in sequences.items():
        for number, (ours, theirs) in enumerate(zip_longest(first, sequence)):
            if ours is None or theirs is None or str(ours) != str(theirs):
                problems.append(
                    f"communicator {communicator.name}: collective {number} is {ours or 'none'} on rank 0, "
                    f"{theirs or 'none'} on rank {rank}"
                )
                break


def _check_messages(communicator: Communicator, calls: Mapping[int, list[Call]], problems: list[str]) -> None:
    pairs: dict[tuple[int, int], dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    for rank, sequence in calls.items():
        for call in sequence:
            if call.is_message:
                pair = (rank, call.root) if call.kind == "send" else (call.root, rank)
                pairs[pair][call.kind].append(call)
    for (source, target), both in sorted(pairs.items()):
        for number, (sent, received) in enumerate(zip_longest(both["send"], both["recv"])):
            if (
                sent is None
                or received is None
                or (sent.count, sent.dtype) != (received.count, received.dtype)
            ):
                problems.append(
                    f"communicator {communicator.name}: message {number} from rank {source} to rank {target}: "
                    f"{sent or 'nothing sent'}, {received or 'nothing received'}"
                )
                break


def _run_in_order(processes: Sequence[Process], communicators: Mapping[str, Communicator]) -> list[str]:
    """Run all processes, each one step at a time; a step ends when all of its calls have met their partners."""
    posted: Counter[tuple[object, ...]] = Counter()
    current = [0] * len(processes)
    waiting: list[list[tuple[Call, int]]] = [[] for _ in processes]

    def post(number: int) -> None:
        waiting[number] = []
        if current[number] < len(processes[number].steps):
            for call in processes[number].steps[current[number]]:
                waiting[number].append((call, posted[_own(call)]))
                posted[_own(call)] += 1

    def met(call: Call, turn: int) -> bool:
        return all(posted[key] > turn for key in _partners(call, communicators[call.comm]))

    for number in range(len(processes)):
        post(number)
    progress = True
    while progress:
        progress = False
        for number, process in enumerate(processes):
            if current[number] < len(process.steps) and all(met(*each) for each in waiting[number]):
                current[number] += 1
                post(number)
                progress = True
    return [
        f"in the order issued, {process.name} waits for ever at step {current[number]}: "
        + "; ".join(f"{call} on {call.comm}" for call, turn in waiting[number] if not met(call, turn))
        for number, process in enumerate(processes)
        if current[number] < len(process.steps)
    ]


def _own(call: Call) -> tuple[object, ...]:
    """What a call is counted under: the n-th of a rank meets the n-th of its partners."""
    if call.kind == "send":
        return call.comm, "send", call.rank, call.root
    if call.kind == "recv":
        return call.comm, "recv", call.root, call.rank
    return call.comm, "collective", call.rank


def _partners(call: Call, communicator: Communicator) -> list[tuple[object, ...]]:
    if call.kind == "send":
        return [(call.comm, "recv", call.rank, call.root)]
    if call.kind == "recv":
        return [(call.comm, "send", call.root, call.rank)]
    return [(call.comm, "collective", rank) for rank in communicator.members]
