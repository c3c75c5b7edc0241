"""The commands that make a topology real. Nothing is run here.

Everything is made inside namespaces, the switch too: the machine's own network is never touched, and deleting
the namespaces deletes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.cluster.topology import Link, Topology

__all__ = ["Command", "setup_commands", "shaping_commands"]

Command = list[str]
Name = Callable[[str], str]

BRIDGE = "bridge0"
# A bucket of 1 ms, at least one of the largest packet that TCP hands to the device (64 KiB).
BUCKET_SECONDS, LEAST_BUCKET = 1e-3, 65536
# No packet is ever dropped: TCP would wait 200 ms before it sent it again, which no cluster fabric does.
# A socket buffers at most 4 to 6 MB, so this queue (bytes) does not fill.
QUEUE = 512 * 2**20


def setup_commands(topology: Topology, name: Name) -> Iterator[Command]:
    """Commands in the order to run them. name: a namespace of the topology -> its name on this machine."""
    for namespace in topology.namespaces:
        yield ["ip", "netns", "add", name(namespace)]
        yield ["ip", "-n", name(namespace), "link", "set", "lo", "up"]
    for namespace in topology.bridges:
        yield ["ip", "-n", name(namespace), "link", "add", BRIDGE, "type", "bridge"]
        yield ["ip", "-n", name(namespace), "link", "set", BRIDGE, "up"]
    for link in topology.links:
        yield from _link_commands(link, topology, name)


def _link_commands(link: Link, topology: Topology, name: Name) -> Iterator[Command]:
    inside, outside = name(link.namespace), name(link.bridge)
    ends = ["netns", inside, "type", "veth", "peer", "name", link.port, "netns", outside]
    yield ["ip", "link", "add", link.device, *ends]
    yield ["ip", "-n", outside, "link", "set", link.port, "master", BRIDGE, "up"]
    if link.namespace in topology.bridges:
        yield ["ip", "-n", inside, "link", "set", link.device, "master", BRIDGE, "up"]
    else:
        yield ["ip", "-n", inside, "address", "add", f"{link.address}/16", "dev", link.device]
        yield ["ip", "-n", inside, "link", "set", link.device, "up"]
    # A device shapes what it sends: the near end limits what the host sends, the far end what it receives.
    yield from shaping_commands(inside, link.device, link.rate, link.delay)
    yield from shaping_commands(outside, link.port, link.rate, None)


def shaping_commands(namespace: str, device: str, rate: int | None, delay: float | None) -> Iterator[Command]:
    """Limit what `device` sends to `rate` bits per second, and delay it by `delay` seconds."""
    add = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
    if delay is not None:
        # netem first and the bucket inside it: the order of tc's own manual.
        yield [*add, "root", "handle", "1:", "netem", "delay", f"{delay * 1e6:.0f}us", "limit", "1000000"]
    if rate is not None:
        place = ["root"] if delay is None else ["parent", "1:1"]
        bucket = max(LEAST_BUCKET, round(rate / 8 * BUCKET_SECONDS))
        shape = ["tbf", "rate", f"{rate}bit", "burst", f"{bucket}b", "limit", f"{QUEUE}b"]
        yield [*add, *place, "handle", "10:", *shape]
