"""`Cluster`: made on entry, gone on exit."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType

from benchmarks.cluster.commands import setup_commands
from benchmarks.cluster.errors import ClusterError
from benchmarks.cluster.host import require_namespaces, run_command
from benchmarks.cluster.launch import launch
from benchmarks.cluster.rates import each, parse_latency
from benchmarks.cluster.stale import Owner, remove_namespace, remove_stale
from benchmarks.cluster.topology import Topology, flat, tree

__all__ = ["Cluster", "topology_of"]

_numbers = itertools.count()


class Cluster:
    """Hosts with rate-limited links, in which torchrun starts ranks of one process group.

    hosts, ranks_per_host: how many.
    rate:      of each host's link, in each direction: "1gbit", a sequence with one per host, None: no limit.
    rank_rate: None: the ranks of a host share its loopback. Else every rank has a link of its own inside its
               host, of this rate (one, or one per rank).
    latency:   one way out of each host: "200us".

    A context manager; it removes what it made also when the program fails or is interrupted, and what earlier
    runs left that were killed. Raises ClusterError for wrong arguments, NoNamespaces where the machine
    or the user cannot have namespaces.
    """

    def __init__(
        self,
        hosts: int = 1,
        ranks_per_host: int = 1,
        rate: str | Sequence[str] | None = None,
        rank_rate: str | Sequence[str] | None = None,
        latency: str | None = None,
    ) -> None:
        self.topology = topology_of(hosts, ranks_per_host, rate, rank_rate, latency)
        self._owner = Owner()
        self._number = next(_numbers)
        self._made = False

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def name(self, namespace: str) -> str:
        """The name on this machine of a namespace of the topology."""
        return self._owner.namespace(f"{self._number}{namespace}")

    def __enter__(self) -> Cluster:
        require_namespaces()
        remove_stale()
        self._made = True
        atexit.register(self.close)
        try:
            for command in setup_commands(self.topology, self.name):
                run_command(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, program: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> None:
        """Run a program on all ranks: ["script.py", "argument"], ["-m", "module"], ["--no-python", "program"].

        env: variables beside this process's own. timeout: seconds. Raises ClusterError if it fails anywhere.
        """
        if not self._made:
            raise ClusterError(
                "the cluster is not there yet, or no longer\n  try: with Cluster(...) as cluster:"
            )
        launch(self.topology, self.name, program, env, timeout)

    def close(self) -> None:
        """Remove the namespaces, and with them links and processes. Twice does no harm."""
        if not self._made:
            return
        self._made = False
        atexit.unregister(self.close)
        for namespace in self.topology.namespaces:
            remove_namespace(self.name(namespace))


def topology_of(
    hosts: int,
    ranks_per_host: int,
    rate: str | Sequence[str] | None,
    rank_rate: str | Sequence[str] | None,
    latency: str | None,
) -> Topology:
    """The topology that Cluster's arguments ask for (they are described there)."""
    rates = each(rate, hosts, "rate", "hosts")
    delay = parse_latency(latency)
    if rank_rate is None:
        return flat(hosts, ranks_per_host, rates, delay)
    rank_rates = each(rank_rate, hosts * ranks_per_host, "rank_rate", "ranks")
    return tree(hosts, ranks_per_host, rates, delay, rank_rates)
