"""The scenarios: a fabric, a model and its batch. Different ones are won by different hand-written ways."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster import Cluster
from benchmarks.racing.more_workloads import llama, mixture, unet, vit
from benchmarks.racing.workloads import Workload, convnet, gpt, mlp, words

__all__ = ["FABRICS", "SCENARIOS", "Fabric", "Scenario"]


@dataclass(frozen=True)
class Fabric:
    """hosts of `ranks` each; rate: of each host's link."""

    text: str
    hosts: int
    ranks: int
    rate: str | None

    def cluster(self) -> Cluster:
        return Cluster(self.hosts, self.ranks, self.rate)


@dataclass(frozen=True)
class Scenario:
    """fabric: a name in FABRICS. memory_limit: bytes per rank, for all contestants. why: what it is there for."""

    name: str
    fabric: str
    workload: Workload
    why: str
    memory_limit: int | None = None


FABRICS = {
    "fast": Fabric("1 host of 4 ranks, loopback", 1, 4, None),
    "hosts": Fabric("2 hosts of 2 ranks, 1 Gbit/s between them", 2, 2, "1gbit"),
    "slow": Fabric("4 hosts of 1 rank, 300 Mbit/s each", 4, 1, "300mbit"),
    "pair": Fabric("2 hosts of 1 rank, 300 Mbit/s each", 2, 1, "300mbit"),
}

SCENARIOS = {
    one.name: one
    for one in (
        Scenario("wide-fast", "fast", mlp(768, 3072, 3, 64), "small batch with large weights, fast fabric"),
        Scenario("wide-hosts", "hosts", mlp(768, 3072, 3, 64), "the same with a slow link between hosts"),
        Scenario("wide-slow", "slow", mlp(768, 3072, 2, 64), "the same on a slow fabric"),
        Scenario("batch-fast", "fast", mlp(256, 1024, 3, 4096), "big batch with small weights, fast fabric"),
        Scenario("batch-slow", "slow", mlp(256, 1024, 3, 4096), "the same on a slow fabric"),
        Scenario(
            "memory-fast",
            "fast",
            mlp(768, 3072, 3, 1024),
            "a limit that full copies do not meet",
            memory_limit=150_000_000,
        ),
        Scenario("gpt-fast", "fast", gpt(2048, 128, 256, 2, 8), "a small transformer, fast fabric"),
        Scenario("long-hosts", "hosts", gpt(1024, 1024, 128, 2, 4), "long sequence, slow between hosts"),
        Scenario(
            "words-hosts", "hosts", words(16384, 192, 768, 16, 16), "nearly all weights in the vocabulary"
        ),
        Scenario(
            "convnet-hosts",
            "hosts",
            convnet(24, 32, 4096, 100, 64),
            "a trunk for data parallelism, a head for tensor parallelism",
        ),
        Scenario("convnet-fast", "fast", convnet(24, 32, 4096, 100, 64), "the same on a fast fabric"),
        Scenario(
            "vit-hosts", "hosts", vit(32, 4, 192, 4, 32, head=24), "a vision transformer, slow between hosts"
        ),
        Scenario("unet-fast", "fast", unet(16, 3, 192), "one image: only its space can be split"),
        Scenario(
            "llama-hosts", "hosts", llama(1024, 2048, 128, 2, 4), "very long sequences, slow between hosts"
        ),
        Scenario(
            "mixture-fast",
            "fast",
            mixture(1024, 64, 128, 2, 8, experts=8, hidden=512),
            "many weights that every token reads: a dense mixture of experts",
        ),
    )
}
