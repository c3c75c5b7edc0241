"""Sockets and processes, as the kernel tells."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from autoshard.watching.connections import cut, listening
from autoshard.watching.liveness import Processes
from autoshard.watching.stopping import Stoppable, Stopped


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return server, client, server.accept()[0]


def test_a_connection_between_ranks_is_cut_and_no_other() -> None:
    server, client, accepted = connected()
    other_server, other, other_accepted = connected()
    with server, client, accepted, other_server, other, other_accepted:
        client.setblocking(False)
        assert server.getsockname() in listening()
        assert cut(frozenset(), frozenset([server.getsockname()])) == 1
        assert accepted.recv(1) == b""  # the end
        other.sendall(b"x")
        assert other_accepted.recv(1) == b"x"
        # A duplicate shares its flags with the socket: the owner's must not change.
        assert not client.getblocking()
        assert not os.get_blocking(client.fileno())


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
