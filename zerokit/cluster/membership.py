"""Membership in a group of processes that another launcher has started.

torchrun            RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
srun                SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NODELIST
Open MPI's mpirun   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; on several nodes with -x MASTER_ADDR=HOST
other mpiruns       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS; on several nodes with -genv MASTER_ADDR HOST
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerokit.cluster.hosts import expand_hostlist
from zerokit.cluster.slurm import node_address
from zerokit.errors import UsageError
from zerokit.network import PORTS

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Membership:
    """One of `count` processes that were started together; number 0 is the leader.

    Attributes:
        scheme: the launcher that started them, as messages name it.
        index: this one's number.
        count: how many there are.
        nproc_per_node: ranks of each node.
        master_addr: where the others reach number 0.
        master_port: where they meet.
        has_store: whether a store of torchrun's listens there already.
        job: the launcher's name for these processes, where it has one; two jobs may choose the same port.
    """

    scheme: str
    index: int
    count: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    has_store: bool = False
    job: str = ""

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.index == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes are on this machine: on one node, or where they meet at a loopback address."""
        return self.nodes == 1 or self.master_addr == "localhost" or _is_loopback(self.master_addr)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.node_of(self.count)

    def node_of(self, index: int) -> int:
        """The node of the process with this number."""
        return index // self.nproc_per_node

    def require_world(self, nodes: int, nproc_per_node: int) -> None:
        """Raise `UsageError` unless these are the ranks that were started."""
        if (nodes, nproc_per_node) != (self.nodes, self.nproc_per_node):
            raise UsageError(
                f"{self.scheme} started {self.nodes} nodes with {self.nproc_per_node} ranks each, "
                f"but {nodes} nodes with {nproc_per_node} ranks each are requested: omit --nodes and --nproc-per-node"
            )

    def describe(self) -> str:
        """This member's number and the count, as text."""
        return f"rank {self.index} of {self.count} that {self.scheme} started"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def find_membership(environment: Mapping[str, str]) -> Membership | None:
    """The membership from the environment; None if this process was started alone.

    Raises `UsageError` where the environment contradicts itself, or lacks something that cannot be guessed.
    """
    # In an allocation mpirun starts a daemon on each node by srun, whose variables its ranks inherit.
    for find in (_torchrun, _mpirun, _srun):
        if (member := find(environment)) is not None:
            if not 0 < member.master_port < 2**16:
                raise UsageError(f"the ranks cannot meet at port {member.master_port}: expected 1 to 65535")
            return member
    if {"PET_NODE_RANK", "PET_NNODES"} <= environment.keys():  # a TrainJob's pod
        raise UsageError(
            "PET_NODE_RANK is set, by which torchrun starts the ranks of a node: start them by `torchrun --no-python "
            "zerokit ...`, or unset it"
        )
    return None


def _numbers(environment: Mapping[str, str], names: str) -> list[int]:
    """The values of variables whose names are separated by blanks."""
    values = [(name, environment.get(name, "")) for name in names.split()]
    for name, value in values:
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise UsageError(
                f"{name} is {value or 'not set'!r:.60}, expected a number: the launcher's environment is incomplete"
            )
    return [int(value) for _, value in values]


def _one_rank(
    environment: Mapping[str, str],
    scheme: str,
    numbers: Sequence[int],
    job: str,
    first: str | None = None,
) -> Membership:
    """One rank.

    Args:
        environment: may have MASTER_ADDR and MASTER_PORT.
        scheme: the launcher's name.
        numbers: the rank, the world size, the rank on its node, the ranks of each node.
        job: has the same value on all ranks, and on no others on their machines.
        first: the address of rank 0, where it is known.
    """
    rank, world, local_rank, local_world = numbers
    if local_world < 1 or world % local_world or local_rank >= local_world or rank >= world:
        raise UsageError(
            f"{scheme} started rank {rank} of {world}, number {local_rank} of {local_world} on its node: zerokit needs "
            "the same number of ranks on every node"
        )
    if rank % local_world != local_rank:
        raise UsageError(
            f"{scheme} started rank {rank} as number {local_rank} of {local_world} on its node, but zerokit needs "
            "consecutive ranks on a node: request a block distribution (mpirun --map-by slot)"
        )
    address = environment.get("MASTER_ADDR") or (first if world > local_world else "127.0.0.1")
    if not address:
        raise UsageError(
            f"{scheme} started ranks on {world // local_world} nodes, but does not say where rank 0 is: set "
            "MASTER_ADDR to its host (mpirun -x MASTER_ADDR=HOST)"
        )
    # Two jobs on a machine should not meet at one port.
    port = PORTS[zlib.crc32(job.encode()) % len(PORTS)]
    if environment.get("MASTER_PORT"):
        (port,) = _numbers(environment, "MASTER_PORT")
    return Membership(
        scheme=scheme,
        index=rank,
        count=world,
        nproc_per_node=local_world,
        master_addr=address,
        master_port=port,
        job=job,
        has_store=scheme == "torchrun" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _torchrun(environment: Mapping[str, str]) -> Membership | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    environment = {"LOCAL_WORLD_SIZE": environment["WORLD_SIZE"], **environment}
    numbers = _numbers(environment, "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT")
    return _one_rank(environment, "torchrun", numbers[:4], "")


def _srun(environment: Mapping[str, str]) -> Membership | None:
    # The batch script has SLURM_PROCID as well, but no step of its own that srun numbered.
    if "SLURM_PROCID" not in environment or not environment.get("SLURM_STEP_ID", "").isdecimal():
        return None
    world, nodes, node, local_rank = _numbers(
        environment, "SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_NODEID SLURM_LOCALID"
    )
    names = expand_hostlist(environment.get("SLURM_STEP_NODELIST", ""))
    # "2(x3)"; with other numbers on other nodes "2(x2),1".
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if nodes == 0 or world % nodes or "," in tasks:
        raise UsageError(
            f"srun started {world} ranks on {nodes} nodes{tasks and f' ({tasks})'}: zerokit needs the same number "
            "on every node"
        )
    each = world // nodes
    return _one_rank(
        environment,
        "srun",
        # Not SLURM_PROCID: srun may number ranks in another order (-m cyclic), but neighbours are on one node.
        (node * each + local_rank, world, local_rank, each),
        f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}",
        first=node_address(names[0]) if names and nodes > 1 and "MASTER_ADDR" not in environment else None,
    )


_RANKS_OF_MPI = (
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
)


def _mpirun(environment: Mapping[str, str]) -> Membership | None:
    for names in _RANKS_OF_MPI:
        if set(names.split()) <= environment.keys():
            jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT")
            job = next((environment[name] for name in jobs if name in environment), "")
            return _one_rank(environment, "mpirun", _numbers(environment, names), job)
    return None
