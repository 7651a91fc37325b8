"""Nodes in an allocation of Slurm: one `srun` per node.

Node 0 is the first of Slurm's own list of nodes. Where there is no such list, nothing is guessed.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokit.cluster.hosts import expand_hostlist
from zerokit.cluster.remote import RemoteHost, node_command
from zerokit.errors import UsageError
from zerokit.network import address_towards


@dataclass(frozen=True, slots=True)
class Container:
    """A container image for the nodes.

    Attributes:
        image: for Pyxis a reference or a squashfs file, for Apptainer a SIF file or `docker://…`.
        runtime: "pyxis" or "apptainer".
    """

    image: str
    runtime: str

    def wrap(self, command: list[str], here: str) -> list[str]:
        """The words after srun's options that run the command inside the image, in the folder `here`.

        Pyxis (https://github.com/NVIDIA/pyxis) has further options for srun; Apptainer gets the node's GPUs by `--nv`.
        """
        if self.runtime == "apptainer":
            return ["apptainer", "exec", "--nv", "--bind", here, "--pwd", here, self.image, *command]
        mounted = (f"--container-mounts={here}:{here}", f"--container-workdir={here}")
        return [f"--container-image={self.image}", *mounted, *command]


def allocated_hosts(environment: Mapping[str, str]) -> list[str]:
    """The allocation's nodes in Slurm's order; raises `UsageError` if there are none."""
    text = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not text:
        raise UsageError(
            "this is a Slurm allocation (SLURM_JOB_ID is set) without a list of nodes: SLURM_JOB_NODELIST is not set"
        )
    return expand_hostlist(text)


def node_address(host: str) -> str:
    """A node's address: its name if that resolves here, otherwise the address that Slurm has.

    Raises `UsageError` where neither is known.
    """
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        pass
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", host], capture_output=True, text=True, check=False
        )
        match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        if match is not None and match[1] != host:
            return match[1]
    raise UsageError(
        f"Slurm's node {host} does not resolve on this machine, and scontrol has no address for it: add it to DNS or "
        "/etc/hosts, or set MASTER_ADDR"
    )


_OF_THE_JOB = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
)
"""What the job was asked for all tasks or for each, and srun would ask for the one of a node, which has all ranks."""


def _gpus_of_a_node() -> int:
    """Where the job has so many GPUs in all or for a task, of which srun would ask for too many or too few."""

    def number(name: str) -> int:  # "8", "a100:8", "a100:4,h100:4"
        return sum(map(int, re.findall(r"(?:^|[:,])([0-9]{1,9})(?=,|$)", os.environ.get(name, ""))))

    gpus = number("SLURM_GPUS") or number("SLURM_GPUS_PER_TASK") * number("SLURM_NTASKS")
    return gpus // max(1, number("SLURM_JOB_NUM_NODES"))


def srun_host(host: str, python: str, container: Container | None = None) -> RemoteHost:
    """Start a node of the allocation with a job step on it alone."""
    options = [
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--overlap",
        "--unbuffered",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",  # one task has one core to itself otherwise: its ranks share the job's cores of the node
    ]
    if gpus := _gpus_of_a_node():
        options.append(f"--gpus={gpus}")
    if "SLURM_GPU_BIND" in os.environ:  # which would hide all but the first one's from the node's ranks
        options.append("--gpu-bind=none")

    def command(port: int, name: str) -> Sequence[str]:
        address = address_towards(node_address(host))
        words = ["sh", "-c", node_command(python, address, port, name)]
        return ["srun", *options, *(words if container is None else container.wrap(words, str(Path.cwd())))]

    return RemoteHost(host, command, _OF_THE_JOB)
