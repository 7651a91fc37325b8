"""A launcher of the doctor's ranks on three hosts on this machine, which are wired to each other."""

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
from tests.support.namespaces import Hosts
from zerokit.errors import ZerokitError

NODES = ("node-0", "node-1", "node-2")
_NEW_NAME, _NEW_MOUNTS = 0x04000000, 0x00020000


def launcher(hosts: Hosts) -> Callable[..., None]:
    """Its ranks find torchrun's environment."""

    def launch(
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        poll: Callable[[], None],
    ) -> None:
        assert (nodes, nproc_per_node) == (len(NODES), 1)
        common = {
            "WORLD_SIZE": str(nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }
        common |= {"MASTER_ADDR": hosts.addresses[NODES[0]], "MASTER_PORT": "29500"}
        ranks: list[ForkedProcess] = []
        try:
            for number, host in enumerate(NODES):
                (outputs := log_dir / f"log-{host}").mkdir()
                variables = os.environ | common | {"RANK": str(number), "GROUP_RANK": str(number)}
                where = (hosts.namespace(host), f"{hosts.folder}/enter-{host}")
                ranks.append(ForkedProcess(outputs, variables, _be_rank, *where, module, list(arguments)))
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

    return launch


def _be_rank(network: str, enter: str, module: str, arguments: list[str]) -> None:
    """Run the module on a host."""
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as namespace:
        if system.setns(namespace.fileno(), 0) or system.unshare(_NEW_NAME | _NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), f"no way into {network}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # what is mounted next is seen here alone
    subprocess.run(["sh", enter, "true"], check=True)  # gives it the host's name and table of names
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
