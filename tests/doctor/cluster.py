"""Three nodes on one machine: each has a network, a host name and a table of names of its own, and a wire to a hub.

node-0  eth0 10.88.0.1 ─┐
node-1  eth0 10.88.0.2 ─┼─ bridge
node-2  eth0 10.88.0.3 ─┘
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support.forked import ForkedProcess
from zerokit.errors import ZerokitError

NODES = 3
_HOLDER = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo; exec sleep 600"]
"""Keeps the namespaces; it says a line when it is in them."""


class Cluster:
    """Use as a context manager; `folder` keeps the tables of names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            for _ in range(NODES + 1):
                self._holders.append(subprocess.Popen(_HOLDER, stdout=subprocess.PIPE))
                assert self._holders[-1].stdout is not None
                self._holders[-1].stdout.readline()
            hub = NODES
            self.on(hub, "ip link add hub type bridge && ip link set hub up")
            for node in range(NODES):
                self.on(
                    hub,
                    f"ip link add to{node} type veth peer name eth0 netns {self._holders[node].pid} &&"
                    f"ip link set to{node} master hub up",
                )
                self.on(
                    node,
                    f"hostname node-{node} && ip link set lo up && ip addr add {address(node)}/24 dev eth0 &&"
                    "ip link set eth0 up",
                )
                self.names(node, range(NODES))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Namespaces end with their last process."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()

    def on(self, node: int, script: str) -> None:
        """Run a script there."""
        subprocess.run([*self._enter(node), "sh", "-c", script], check=True, capture_output=True)

    def names(self, node: int, known: Sequence[int]) -> None:
        """Let a node know the names of others, and its own."""
        table = self._folder / f"hosts-{node}"
        table.write_text("".join(f"{address(other)} node-{other}\n" for other in known))
        self.on(node, f"mount --bind {table} /etc/hosts")

    def slow_down(self, node: int, rate: str) -> None:
        """Make the wire of a node slow in both directions."""
        shape = f"root tbf rate {rate} burst 64kb latency 200ms"
        self.on(node, f"tc qdisc add dev eth0 {shape}")
        self.on(NODES, f"tc qdisc add dev to{node} {shape}")

    def _enter(self, node: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[node].pid), "--net", "--uts", "--mount"]

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        poll: Callable[[], None],
    ) -> None:
        """A launcher: the ranks find torchrun's environment."""
        assert nproc_per_node == 1
        ranks: list[ForkedProcess] = []
        outputs = [log_dir / f"log-{node}" for node in range(nodes)]
        try:
            for node in range(nodes):
                rank = {
                    "RANK": node,
                    "WORLD_SIZE": nodes,
                    "GROUP_RANK": node,
                    "LOCAL_RANK": 0,
                    "LOCAL_WORLD_SIZE": 1,
                }
                meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
                variables = os.environ | meeting | {name: str(value) for name, value in rank.items()}
                outputs[node].mkdir()
                holder = self._holders[node].pid
                ranks.append(
                    ForkedProcess(outputs[node], variables, _be_rank, holder, module, list(arguments))
                )
            while any(rank.returncode is None for rank in ranks):
                poll()
                time.sleep(0.05)
            for node, one in enumerate(ranks):
                if one.returncode:
                    raise ZerokitError(f"node {node} failed: {one.communicate()[1][-1000:]}")
        finally:
            for one in ranks:
                one.kill()
                one.communicate()


def _be_rank(holder: int, module: str, arguments: list[str]) -> None:
    """Run the module on a node: in the namespaces of its `holder`."""
    system = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{holder}/ns/{kind}") as namespace:
            if system.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {kind}")
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def address(node: int) -> str:
    return f"10.88.0.{node + 1}"
