"""What this machine allows: runs `ip` and `tc`, and says in words why they do not work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from benchmarks.cluster.commands import Command
from benchmarks.cluster.errors import ClusterError, NoNamespaces

__all__ = ["require_namespaces", "run_command", "why_not_here"]

ROOTLESS = (
    "sudo, or a user namespace: "
    'unshare -rnm sh -c "mount -t tmpfs none /run && python -m benchmarks.cluster ..."'
)


def why_not_here() -> str | None:
    """Why network namespaces cannot be made here, with a remedy; None if they can."""
    try:
        require_namespaces()
    except NoNamespaces as error:
        return str(error)
    return None


def require_namespaces() -> None:
    """Raises NoNamespaces with the reason and a remedy unless a namespace can be made and shaped."""
    if sys.platform != "linux":
        raise NoNamespaces(f"network namespaces are Linux's; this is {sys.platform}\n  try: a Linux machine")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNamespaces(f"{' and '.join(missing)} not found\n  try: apt install iproute2")
    if os.geteuid() != 0:
        raise NoNamespaces(f"only root may make network namespaces\n  try: {ROOTLESS}")
    _try_one()


def _try_one() -> None:
    probe = f"autoshard-probe-{os.getpid()}"
    try:
        run_command(["ip", "netns", "add", probe])
    except ClusterError as error:
        raise NoNamespaces(
            f"this machine allows no network namespaces: {error}\n"
            "  try: in a container, --cap-add=NET_ADMIN --cap-add=SYS_ADMIN (or --privileged)"
        ) from None
    subprocess.run(["ip", "netns", "delete", probe], check=False, capture_output=True)


def run_command(command: Command) -> str:
    """Its standard output; ClusterError with its command line and what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or f"exit code {done.returncode}"
    raise ClusterError(f"`{' '.join(command)}` failed: {said}{_remedy(command, said)}")


def _remedy(command: Command, said: str) -> str:
    if "qdisc kind is unknown" not in said:
        return ""
    kind = "netem" if "netem" in command else "tbf"
    without = "no latency" if kind == "netem" else "no rate"
    return f"\n  this kernel has no {kind} queue\n  try: modprobe sch_{kind}, or {without}"
