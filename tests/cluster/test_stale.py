"""Whose namespaces are removed: those of dead runs, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.cluster import Cluster, ClusterError, NoNamespaces, host
from benchmarks.cluster.stale import Owner, stale_namespaces


def test_only_namespaces_of_dead_runs_are_stale() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        running = Owner(process.pid)
        ours = running.namespace("0host1")
        assert stale_namespaces([ours, "autoshard-theirs", "docker0", Owner().namespace("0switch")]) == []
        process.communicate(b"\n")
    assert stale_namespaces([ours]) == [ours]


def test_a_number_that_was_given_again_is_another_process() -> None:
    reused = f"autoshard-{os.getpid()}-1-0host0"
    assert stale_namespaces([reused]) == [reused]


def test_the_clusters_of_a_process_have_names_of_their_own() -> None:
    assert Cluster().name("host0") != Cluster().name("host0")


def test_no_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    monkeypatch.setattr(host.sys, "platform", "linux")
    with pytest.raises(NoNamespaces, match=r"^tc not found\n  try: apt install iproute2$"):
        host.require_namespaces()


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(host.sys, "platform", "linux")
    assert (reason := host.why_not_here()) is not None
    assert reason.startswith("only root may make network namespaces\n  try: sudo")


def test_a_container_without_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str]) -> str:
        raise ClusterError("Operation not permitted")

    monkeypatch.setattr(host.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(host.os, "geteuid", lambda: 0)
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host, "run_command", refuse)
    assert "--cap-add=NET_ADMIN" in (host.why_not_here() or "")


def test_a_cluster_that_was_never_entered() -> None:
    with pytest.raises(ClusterError, match="the cluster is not there yet"):
        Cluster().run(["x.py"])
