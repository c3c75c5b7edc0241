"""Who is connected to whom: the cluster as namespaces, bridges and links, before any of it exists."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster.errors import ClusterError

__all__ = ["DEVICE", "Link", "Node", "Topology", "flat", "tree"]

DEVICE = "eth0"  # of every node, so that one GLOO_SOCKET_IFNAME holds for all
SWITCH = "switch"
MOST = 250  # hosts, and ranks per host: one byte of the address each


@dataclass(frozen=True)
class Node:
    """A namespace in which `ranks` processes run, at an IPv4 address of the cluster's network.

    host: the name that its processes take the machine to have.
    """

    namespace: str
    address: str
    ranks: int
    host: str


@dataclass(frozen=True)
class Link:
    """A cable from a device in `namespace` to port `port` of the bridge in `bridge`.

    rate: bits per second in each direction, None for no limit; delay: seconds on the way out, None for none.
    address: of the device, where it is a node's; "" where the cable joins two bridges.
    """

    namespace: str
    device: str
    bridge: str
    port: str
    rate: int | None
    delay: float | None = None
    address: str = ""


@dataclass(frozen=True)
class Topology:
    """nodes: in the order of their ranks. bridges: the namespaces that hold one. links: all cables."""

    nodes: tuple[Node, ...]
    bridges: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (*self.bridges, *(node.namespace for node in self.nodes))

    @property
    def world_size(self) -> int:
        return sum(node.ranks for node in self.nodes)


def flat(hosts: int, ranks: int, rates: tuple[int | None, ...], delay: float | None) -> Topology:
    """Hosts at one switch; the ranks of a host share its namespace, and meet on its loopback.

    rates: of each host's cable.
    """
    _check(hosts, ranks)
    nodes = tuple(Node(f"host{host}", _address(host, 0), ranks, f"host{host}") for host in range(hosts))
    links = tuple(
        Link(node.namespace, DEVICE, SWITCH, f"port{host}", rates[host], delay, node.address)
        for host, node in enumerate(nodes)
    )
    return Topology(nodes, (SWITCH,), links)


def tree(
    hosts: int,
    ranks: int,
    rates: tuple[int | None, ...],
    delay: float | None,
    rank_rates: tuple[int | None, ...],
) -> Topology:
    """As `flat`, with a namespace and a cable of its own for each rank, to a bridge in its host.

    rates: of the cable from each host's bridge to the switch. rank_rates: of the cables inside hosts, by rank.
    """
    _check(hosts, ranks)
    nodes: list[Node] = []
    links: list[Link] = []
    for host in range(hosts):
        links.append(Link(f"host{host}", "uplink", SWITCH, f"port{host}", rates[host], delay))
        for local in range(ranks):
            node = Node(f"host{host}rank{local}", _address(host, local), 1, f"host{host}")
            rate = rank_rates[host * ranks + local]
            nodes.append(node)
            links.append(
                Link(node.namespace, DEVICE, f"host{host}", f"port{local}", rate, None, node.address)
            )
    return Topology(tuple(nodes), (SWITCH, *(f"host{host}" for host in range(hosts))), tuple(links))


def _address(host: int, local: int) -> str:
    return f"10.77.{host}.{local + 1}"


def _check(hosts: int, ranks: int) -> None:
    for what, value in (("hosts", hosts), ("ranks_per_host", ranks)):
        if not 1 <= value <= MOST:
            raise ClusterError(f"{what} is {value}\n  try: 1 to {MOST}")
