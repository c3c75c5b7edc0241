"""One torchrun per node of the cluster, all of one process group; when one fails the others are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.cluster.errors import ClusterError
from benchmarks.cluster.topology import DEVICE, Node, Topology

__all__ = ["environment", "launch", "torchrun_command"]

MASTER_PORT = 29500  # the namespaces are ours: nobody else listens there
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG, CLONE_NEWUTS = 1, 0x04000000


def torchrun_command(
    topology: Topology, index: int, name: Callable[[str], str], program: Sequence[str]
) -> list[str]:
    """The command that starts the ranks of node `index`.

    program: a script and its arguments, ["-m", module, ...], or any other executable after "--no-python".
    """
    node = topology.nodes[index]
    return [
        *("ip", "netns", "exec", name(node.namespace)),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(topology.nodes)), "--node-rank", str(index)),
        *("--nproc-per-node", str(node.ranks)),
        *("--master-addr", topology.nodes[0].address, "--master-port", str(MASTER_PORT)),
        # Else torchrun looks up the machine's name, which has no address in here.
        *("--local-addr", node.address),
        *program,
    ]


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, one thread per rank unless said otherwise, and the cluster's interface."""
    interface = {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE}
    return {"OMP_NUM_THREADS": "1", **os.environ, **interface, **(given or {})}


def launch(
    topology: Topology,
    name: Callable[[str], str],
    program: Sequence[str],
    env: Mapping[str, str] | None,
    timeout: float | None,
) -> None:
    """Run `program` on all ranks until all have ended.

    Raises ClusterError if it fails on a node or outlasts `timeout` seconds; no process of it is left behind.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(len(topology.nodes)):
            command = torchrun_command(topology, index, name, program)
            processes.append(_start(command, environment(env), topology.nodes[index].host))
        _wait(processes, topology.nodes, timeout)
    finally:
        _stop(processes)


def _start(command: list[str], env: dict[str, str], host: str) -> subprocess.Popen[bytes]:
    # Its own session: Ctrl-C reaches this process alone, which then stops the ranks in order.
    return subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=partial(_become, host))


def _become(host: str) -> None:
    """Run in the child before the program: die with the parent, and be on a machine called `host`.

    SIGTERM when the parent dies, were it by SIGKILL [prctl(2), PR_SET_PDEATHSIG]; a host name of its own
    [unshare(2), CLONE_NEWUTS], by which programs tell which ranks share a machine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if libc.unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(host)


def _wait(processes: Sequence[subprocess.Popen[bytes]], nodes: Sequence[Node], timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for node, code in zip(nodes, codes, strict=True):
            if code:
                raise ClusterError(
                    f"the program failed on {node.namespace} ({_reason(code)}); see its output above"
                )
        if all(code == 0 for code in codes):
            return
        if deadline is not None and time.monotonic() > deadline:
            raise ClusterError(f"the program did not end in {timeout:g} s\n  try: a larger timeout")
        time.sleep(POLL_SECONDS)


def _reason(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all: torchrun passes SIGTERM on to its ranks; what does not go is killed."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
