"""Which of several processes this one is, from the environments of those who start them."""

from __future__ import annotations

import pytest

from zerokit.cluster import membership
from zerokit.cluster.membership import Membership, find_membership
from zerokit.errors import UsageError


def variables(prefix: str, text: str) -> dict[str, str]:
    return dict(f"{prefix}{word}".split("=") for word in text.split())


TORCHRUN = variables(
    "",
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=gpu1 MASTER_PORT=29511 "
    "TORCHELASTIC_USE_AGENT_STORE=True",
)
SRUN = variables(
    "SLURM_",
    "JOB_ID=7 STEP_ID=2 PROCID=3 LOCALID=1 NODEID=1 STEP_NUM_TASKS=4 STEP_NUM_NODES=2 STEP_NODELIST=gpu[08-09]",
)
OPEN_MPI = variables("OMPI_COMM_WORLD_", "RANK=1 SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2") | {
    "PMIX_NAMESPACE": "job-1"
}
PMI = variables("", "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=gpu1")
POD = variables(
    "PET_", "NODE_RANK=1 NNODES=2 NPROC_PER_NODE=auto MASTER_ADDR=bench-node-0-0.bench MASTER_PORT=29400"
)


@pytest.fixture(autouse=True)
def _slurm_knows_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "node_address", lambda host: f"{host}.local")


def find(environment: dict[str, str]) -> Membership:
    member = find_membership(environment)
    assert member is not None
    return member


def test_nobody_has_started_this_process() -> None:
    assert find_membership({}) is None
    # A batch script's own process: no step of srun's.
    assert find_membership({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None
    assert find_membership({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_torchrun() -> None:
    member = find(TORCHRUN)
    assert (member.index, member.count, member.node_of(member.index), member.nodes) == (3, 4, 1, 2)
    assert member.nproc_per_node == 2
    assert (member.master_addr, member.master_port, member.has_store) == ("gpu1", 29511, True)
    assert not member.leads
    assert member.describe() == "rank 3 of 4 that torchrun started"
    alone = {name: TORCHRUN[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    first = find(alone | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert (first.leads, first.nodes, first.nproc_per_node, first.has_store) == (True, 1, 2, False)


def test_srun_finds_rank_0_at_the_first_node_of_its_list() -> None:
    member = find(SRUN)
    assert (member.scheme, member.index, member.count) == ("srun", 3, 4)
    assert (member.node_of(member.index), member.nodes, member.nproc_per_node) == (1, 2, 2)
    assert member.master_addr == "gpu08.local"
    assert find(SRUN | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"}).master_port == 1234
    # Every rank computes the same port; another step has another.
    assert find(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == member.master_port
    assert find(SRUN | {"SLURM_STEP_ID": "3"}).master_port != member.master_port


def test_srun_may_number_ranks_in_any_order() -> None:
    """-m cyclic: 0 and 2 on the first node, 1 and 3 on the second."""
    members = [
        find(SRUN | {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local})
        for rank, node, local in ("000", "110", "201", "311")
    ]
    assert [(one.index, one.node_of(one.index)) for one in members] == [(0, 0), (2, 1), (1, 0), (3, 1)]


def test_mpirun() -> None:
    member = find(OPEN_MPI)
    assert (member.index, member.count, member.nodes, member.master_addr) == (1, 2, 1, "127.0.0.1")
    assert (find(PMI).index, find(PMI).nodes, find(PMI).master_addr) == (0, 2, "gpu1")
    assert find(OF_TWO_NODES | {"MASTER_ADDR": "gpu1"}).master_addr == "gpu1"
    # In an allocation its daemons are steps of srun's.
    assert find(SRUN | OPEN_MPI) == member


OF_TWO_NODES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK is 'not set', expected a number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "the same number of ranks on every node"),
        (TORCHRUN | {"RANK": "4"}, "the same number of ranks on every node"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "5"}, "the same number on every node"),
        (SRUN | {"SLURM_STEP_NUM_NODES": "0"}, "the same number on every node"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, r"4 ranks on 2 nodes \(3,1\)"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
            "request a block distribution",
        ),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[1-"}, "not a list of nodes"),
        (OF_TWO_NODES, r"set MASTER_ADDR to its host \(mpirun -x MASTER_ADDR=HOST\)"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "the same number of ranks"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "cannot meet at port 99999: expected 1 to 65535"),
        (POD, "start them by `torchrun --no-python zerokit"),
    ],
)
def test_contradictions_are_told(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find(environment)
