"""Two "nodes" on one machine: joined network namespaces where these may be made, else two loopback addresses."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_NETWORK = 0x40000000


@dataclass(frozen=True)
class Node:
    """A place to start processes at.

    Attributes:
        address: by which other nodes reach it.
        interface: of its network.
        prefix: what a command that runs there begins with.
        namespace: file of its network namespace; None where it has none of its own.
    """

    address: str
    interface: str = "lo"
    prefix: list[str] = field(default_factory=list)
    namespace: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What its administrators set: gloo otherwise takes the address that the machine's name stands for."""
        return {"GLOO_SOCKET_IFNAME": self.interface}

    def enter(self) -> None:
        """Move the calling thread, and what it starts, to this node."""
        os.environ.update(self.environment)
        if self.namespace is not None:
            with self.namespace.open() as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), _NETWORK) != 0:
                    raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, for as long as the context lasts."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        yield _namespaces(holders) or (Node("127.0.0.1"), Node("127.0.0.2"))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()


def _namespaces(holders: list[subprocess.Popen[bytes]]) -> tuple[Node, Node] | None:
    """Two namespaces, each held by a process that is added to `holders`; None where they may not be made."""
    if not all(shutil.which(tool) for tool in ("ip", "nsenter", "unshare")):
        return None
    for _ in range(2):
        command = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 600"]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    if not all(holder.stdout is not None and holder.stdout.readline() for holder in holders):
        return None
    try:
        return _join(*(holder.pid for holder in holders))
    except subprocess.CalledProcessError:
        return None


def _join(*pids: int) -> tuple[Node, Node]:
    """Lay a cable between the namespaces of two processes."""
    names = ["node0", "node1"]
    ends = [f"{name} netns {pid}" for name, pid in zip(names, pids, strict=True)]
    _run(f"ip link add {ends[0]} type veth peer {ends[1]}")
    nodes = []
    for index, (name, pid) in enumerate(zip(names, pids, strict=True)):
        enter = f"nsenter --net --target {pid}"
        _run(f"{enter} ip address add 10.77.0.{index + 1}/24 dev {name}")
        for link in (name, "lo"):
            _run(f"{enter} ip link set {link} up")
        nodes.append(Node(f"10.77.0.{index + 1}", name, enter.split(), Path(f"/proc/{pid}/ns/net")))
    first, second = nodes
    return first, second


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
