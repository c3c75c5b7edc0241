"""The cluster itself: ranks meet, links are limited, nothing is left. Skipped where namespaces are not allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, ClusterError, why_not_here
from benchmarks.cluster.stale import NAMESPACES

pytestmark = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))

# Who am I, what is the sum of our ranks; written by every rank to a file of its own.
MEET = """
import json, os, socket, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
here = {"sum": total.item(), "world": dist.get_world_size(), "local": os.environ["LOCAL_RANK"]}
here["host"] = socket.gethostname()
here["network"] = os.readlink("/proc/self/ns/net")
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(here, file)
dist.destroy_process_group()
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600)
"""
WAIT = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(600)"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def left() -> set[str]:
    return {path.name for path in NAMESPACES.iterdir() if path.name.startswith(f"autoshard-{os.getpid()}-")}


def test_ranks_on_two_hosts_meet(script: Callable[[str], str], tmp_path: Path) -> None:
    with Cluster(hosts=2, ranks_per_host=2, rate="1gbit") as cluster:
        assert len(left()) == 3
        cluster.run([script(MEET), str(tmp_path)], timeout=120)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [(one["sum"], one["world"], one["local"]) for one in said] == [
        (6.0, 4, "0"),
        (6.0, 4, "1"),
        (6.0, 4, "0"),
        (6.0, 4, "1"),
    ]
    assert [one["host"] for one in said] == ["host0", "host0", "host1", "host1"]
    networks = [one["network"] for one in said]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert left() == set()


def test_links_have_their_rates() -> None:
    with Cluster(hosts=2, ranks_per_host=1, rate=["300mbit", "none"]) as cluster:
        shaped = _queues(cluster, "host0", "eth0")
        assert "tbf" in shaped and "rate 300Mbit" in shaped
        assert "rate 300Mbit" in _queues(cluster, "switch", "port0")
        assert "tbf" not in _queues(cluster, "host1", "eth0")


def test_hosts_of_ranks_with_links_of_their_own() -> None:
    with Cluster(hosts=2, ranks_per_host=2, rate="100mbit", rank_rate="1gbit") as cluster:
        assert "rate 1Gbit" in _queues(cluster, "host1rank1", "eth0")
        assert "rate 100Mbit" in _queues(cluster, "host1", "uplink")
        ping = ["--no-python", "python3", "-c", _CONNECT]
        cluster.run(ping, timeout=60)


def test_one_failure_ends_all(script: Callable[[str], str]) -> None:
    with (
        Cluster(hosts=2, ranks_per_host=1) as cluster,
        pytest.raises(ClusterError, match="the program failed on host1"),
    ):
        cluster.run([script(FAIL)], timeout=120)
    assert left() == set()


def test_a_run_that_takes_too_long() -> None:
    with (
        Cluster(hosts=1, ranks_per_host=1) as cluster,
        pytest.raises(ClusterError, match=r"did not end in 0\.5 s"),
    ):
        cluster.run(["--no-python", "sleep", "600"], timeout=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(
    script: Callable[[str], str], tmp_path: Path, number: signal.Signals
) -> None:
    process, started = _command_line(script(WAIT), tmp_path)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert started and not list(NAMESPACES.glob(f"autoshard-{process.pid}-*"))


def test_a_killed_run_is_cleaned_up_by_the_next(script: Callable[[str], str], tmp_path: Path) -> None:
    process, _ = _command_line(script(WAIT), tmp_path)
    process.kill()
    process.wait(60)
    assert list(NAMESPACES.glob(f"autoshard-{process.pid}-*"))
    with Cluster():
        assert not list(NAMESPACES.glob(f"autoshard-{process.pid}-*"))


def _command_line(script: str, folder: Path) -> tuple[subprocess.Popen[bytes], bool]:
    """The command line, with its program started."""
    flag = folder / "started"
    words = ["--hosts", "1", "--ranks", "1", "--", "--no-python", sys.executable, script, str(flag)]
    # Tests that run in a shell's background ignore Ctrl-C, and so would what they start.
    heed = ["env", "--default-signal=INT"]
    process = subprocess.Popen([*heed, sys.executable, "-m", "benchmarks.cluster", *words])
    deadline = time.monotonic() + 60
    while not flag.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, flag.exists()


def _queues(cluster: Cluster, namespace: str, device: str) -> str:
    command = ["tc", "-n", cluster.name(namespace), "qdisc", "show", "dev", device]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Rank 3 waits for rank 0, which is in another host: the way leads over three bridges.
_CONNECT = """
import os, socket, time
rank = int(os.environ["RANK"])
if rank == 3:
    with socket.create_server(("0.0.0.0", 5000)) as server:
        assert server.accept()[0].recv(5) == b"hello"
elif rank == 0:
    for _ in range(100):
        try:
            socket.create_connection(("10.77.1.2", 5000), 1).sendall(b"hello")
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise SystemExit(1)
"""
