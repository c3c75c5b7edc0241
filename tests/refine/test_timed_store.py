"""Times on disk: written whole, read where everything is as it was, and never else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.refine.time_work import TimedStore, timed_key
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from tests.refine.tasks import task, timed

MACHINES = [("a/0", "EPYC, 2 cores, 1 thread per rank")] * 2


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def times() -> TimedPrices:
    from autoshard.refine.rounds import Rounds

    one = task()
    return timed(one, Rounds(one, TimedStore({"a": 0}), lambda *_: 100.0).wanted())


def test_what_is_written_is_read() -> None:
    store, found = TimedStore({"a": 1}), times()
    assert store.read() == TimedPrices()
    store.write(found)
    assert store.read() == found and found.kernels and found.collectives
    assert TimedStore({"a": 2}).read() == TimedPrices()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"made_with": {}, "timed": {"kernels": [3]}}'])
def test_a_damaged_file_is_timed_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    store = TimedStore({"a": 1})
    store.path.parent.mkdir(parents=True)
    store.path.write_text(text)
    assert store.read() == TimedPrices()
    assert "timing again" in caplog.text


def test_a_file_of_another_key_under_the_name_is_not_read() -> None:
    store = TimedStore({"a": 1})
    store.write(times())
    data = json.loads(store.path.read_text())
    store.path.write_text(json.dumps(data | {"made_with": {"a": 2}}))
    assert store.read() == TimedPrices()


def test_the_key_tells_apart_what_takes_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def path(**changes: object) -> Path:
        given = {"machines": MACHINES, "spec": MeshSpec({"x": 2}), "collectives": "gloo", "backend": "eager"}
        return TimedStore(timed_key(**(given | changes))).path  # type: ignore[arg-type]

    here = path()
    others = [
        path(spec=MeshSpec({"x": 4})),
        path(collectives="nccl"),
        path(backend="inductor"),
        path(machines=MACHINES[:1]),
    ]
    monkeypatch.setattr("autoshard.refine.time_work.__version__", "99")
    others.append(path())
    monkeypatch.setattr("autoshard.profiling.startup.torch.__version__", "99")
    others.append(path())
    assert len({here, *others}) == 7
