"""What the emulated cluster asks of `ip`, `tc` and torchrun, without asking it."""

from __future__ import annotations

import sys

import pytest

from benchmarks.cluster import ClusterError
from benchmarks.cluster.__main__ import parser, program_of
from benchmarks.cluster.cluster import topology_of
from benchmarks.cluster.commands import setup_commands, shaping_commands
from benchmarks.cluster.launch import environment, torchrun_command
from benchmarks.cluster.rates import each, parse_latency, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5mbit", 2_500_000),
        ("8kbit", 8000),
        ("9000bit", 9000),
        (None, None),
        ("none", None),
    ],
)
def test_rates(text: str | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["1gbps", "1GB", "fast", "-1gbit", "0gbit", ""])
def test_wrong_rates(text: str) -> None:
    with pytest.raises(ClusterError, match=r"rate is .*\n  try: "):
        parse_rate(text)


def test_latencies() -> None:
    assert parse_latency("200us") == pytest.approx(200e-6)
    assert parse_latency("1.5ms") == pytest.approx(1.5e-3)
    with pytest.raises(ClusterError, match="latency is '3'"):
        parse_latency("3")


def test_one_rate_for_all_or_one_each() -> None:
    assert each("1mbit", 3, "rate", "hosts") == (10**6,) * 3
    assert each(["1mbit", "none"], 2, "rate", "hosts") == (10**6, None)
    with pytest.raises(ClusterError, match="rate has 2 values for 3 hosts"):
        each(["1mbit", "2mbit"], 3, "rate", "hosts")


def test_two_hosts_at_a_switch() -> None:
    topology = topology_of(2, 2, ["1gbit", "none"], None, None)
    assert topology.world_size == 4
    assert [" ".join(command) for command in setup_commands(topology, lambda name: name)] == [
        "ip netns add switch",
        "ip -n switch link set lo up",
        "ip netns add host0",
        "ip -n host0 link set lo up",
        "ip netns add host1",
        "ip -n host1 link set lo up",
        "ip -n switch link add bridge0 type bridge",
        "ip -n switch link set bridge0 up",
        "ip link add eth0 netns host0 type veth peer name port0 netns switch",
        "ip -n switch link set port0 master bridge0 up",
        "ip -n host0 address add 10.77.0.1/16 dev eth0",
        "ip -n host0 link set eth0 up",
        "tc -n host0 qdisc add dev eth0 root handle 10: tbf rate 1000000000bit burst 125000b limit 536870912b",
        "tc -n switch qdisc add dev port0 root handle 10: tbf rate 1000000000bit burst 125000b limit 536870912b",
        "ip link add eth0 netns host1 type veth peer name port1 netns switch",
        "ip -n switch link set port1 master bridge0 up",
        "ip -n host1 address add 10.77.1.1/16 dev eth0",
        "ip -n host1 link set eth0 up",
    ]


def test_a_link_for_every_rank() -> None:
    topology = topology_of(2, 2, "1gbit", ["1mbit", "2mbit", "3mbit", "4mbit"], None)
    assert [(node.namespace, node.address, node.ranks) for node in topology.nodes] == [
        ("host0rank0", "10.77.0.1", 1),
        ("host0rank1", "10.77.0.2", 1),
        ("host1rank0", "10.77.1.1", 1),
        ("host1rank1", "10.77.1.2", 1),
    ]
    assert topology.bridges == ("switch", "host0", "host1")
    rates = {link.namespace: (link.bridge, link.rate) for link in topology.links}
    assert rates["host1"] == ("switch", 10**9)
    assert rates["host1rank0"] == ("host1", 3 * 10**6)
    commands = [" ".join(command) for command in setup_commands(topology, lambda name: name)]
    # The cable between two bridges is a port of both, and has no address.
    assert "ip -n host1 link set uplink master bridge0 up" in commands


def test_latency_and_rate_together() -> None:
    commands = [" ".join(command) for command in shaping_commands("host0", "eth0", 10**6, 2e-4)]
    assert commands == [
        "tc -n host0 qdisc add dev eth0 root handle 1: netem delay 200us limit 1000000",
        "tc -n host0 qdisc add dev eth0 parent 1:1 handle 10: tbf rate 1000000bit burst 65536b limit 536870912b",
    ]


def test_wrong_numbers_of_hosts() -> None:
    with pytest.raises(ClusterError, match="hosts is 0"):
        topology_of(0, 1, None, None, None)
    with pytest.raises(ClusterError, match="ranks_per_host is 300"):
        topology_of(1, 300, None, None, None)


def test_torchrun_joins_all_nodes() -> None:
    command = torchrun_command(
        topology_of(2, 3, None, None, None), 1, lambda name: f"mine-{name}", ["x.py", "1"]
    )
    assert " ".join(command) == (
        f"ip netns exec mine-host1 {sys.executable} -m torch.distributed.run --nnodes 2 --node-rank 1 "
        "--nproc-per-node 3 --master-addr 10.77.0.1 --master-port 29500 --local-addr 10.77.1.1 x.py 1"
    )


def test_gloo_uses_the_clusters_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = environment({"MINE": "1"})
    assert (made["GLOO_SOCKET_IFNAME"], made["OMP_NUM_THREADS"], made["MINE"]) == ("eth0", "1", "1")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["--", "python", "x.py", "-v"], ["x.py", "-v"]),
        (["--", "/usr/bin/python3.12", "-m", "package"], ["-m", "package"]),
        (["x.py"], ["x.py"]),
        (["--", "./run", "1"], ["--no-python", "./run", "1"]),
    ],
)
def test_programs(words: list[str], program: list[str]) -> None:
    assert program_of(words) == program


def test_the_command_line() -> None:
    given = parser().parse_args(
        ["--hosts", "3", "--ranks", "1", "--rate", "1gbit", "--", "python", "x.py", "--hosts", "9"]
    )
    assert (given.hosts, given.ranks, given.rate) == (3, 1, "1gbit")
    assert program_of(given.program) == ["x.py", "--hosts", "9"]
    with pytest.raises(ClusterError, match="no program"):
        program_of(["--"])
