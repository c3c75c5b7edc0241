"""Sockets and processes, as the kernel tells."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoshard.watching.crew import Processes, Stoppable, Stopped, connections, cut


def connected(
    family: socket.AddressFamily = socket.AF_INET,
) -> tuple[socket.socket, socket.socket, socket.socket]:
    """(the server, a client, the server's end): each as a library may have it, of which Python knows nothing."""
    server = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
    client = socket.create_connection(server.getsockname()[:2])
    return server, client, server.accept()[0]


def told(server: socket.socket) -> bytes:
    """As gloo tells where it listens: a structure that holds the kernel's form of the address."""
    family, (host, port) = server.family, server.getsockname()[:2]
    flow = bytes(4) if family == socket.AF_INET6 else b""
    address = int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + flow
    return b"\x02host\x88" + address + socket.inet_pton(family, host) + b"\xff\xff"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_gloos_connection_is_cut_and_no_other(family: socket.AddressFamily) -> None:
    server, client, accepted = connected(family)
    other_server, other, other_accepted = connected(family)
    with server, client, accepted, other_server, other, other_accepted:
        assert cut(b"") == 0
        assert len(connections(told(server))) == 2, "both ends"
        assert cut(told(server)) == 2
        assert client.recv(1) == accepted.recv(1) == b""  # the end
        other.sendall(b"x")
        assert other_accepted.recv(1) == b"x"


@pytest.mark.parametrize("timeout", [None, 0.0, 30.0])
def test_looking_for_connections_changes_no_socket(timeout: float | None) -> None:
    """A duplicate shares its flags with the descriptor of its owner, which may be the client of the store."""
    server, client, accepted = connected()
    with server, client, accepted:
        client.setblocking(False)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(timeout)
        try:
            connections(told(server))
        finally:
            socket.setdefaulttimeout(before)
        assert [os.get_blocking(s.fileno()) for s in (server, client, accepted)] == [True, False, True]


def test_looking_for_connections_gives_up_no_lock(tmp_path: Path) -> None:
    """The kernel drops the locks of a process on a file when any descriptor of it is closed."""
    with open(tmp_path / "lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        connections(b"")
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", other, file.name], capture_output=True, check=False)
        assert b"BlockingIOError" in tried.stderr


def test_a_process_lives_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = Processes()
        processes.add({3: child.pid})
        assert processes.dead() == set()
        child.kill()
        child.wait()
        assert processes.dead() == {3}
        processes.close()


def test_a_block_is_stopped_from_another_thread() -> None:
    stoppable = Stoppable()
    with pytest.raises(Stopped), stoppable.block():
        threading.Thread(target=stoppable.stop).start()
        while True:
            pass


def test_a_stop_after_the_block_hits_nothing() -> None:
    stoppable = Stoppable()
    with stoppable.block():
        pass
    stoppable.stop()
    assert sum(range(10_000)) == 49_995_000
