"""Nodes of an allocation of Slurm: their addresses, GPUs and containers. Slurm's commands are programs in PATH."""

from __future__ import annotations

import pytest

from tests.support.programs import Programs
from zerokit.cluster import slurm
from zerokit.cluster.slurm import Container, allocated_hosts, node_address, srun_host
from zerokit.errors import UsageError


@pytest.fixture
def _n1_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "node_address", lambda host: "127.0.0.1")


@pytest.mark.usefixtures("_n1_is_here")
def test_nodes_run_in_containers() -> None:
    pyxis = srun_host("n1", "python", Container("image.sqsh", "pyxis")).command(7, "0")
    assert "--container-image=image.sqsh" in pyxis
    assert "--nodelist=n1" in pyxis
    apptainer = srun_host("n1", "python", Container("image.sif", "apptainer")).command(7, "0")
    at = apptainer.index("apptainer")
    assert apptainer[at + 1 : at + 4] == ["exec", "--nv", "--bind"]
    assert apptainer[-4:-1] == ["image.sif", "sh", "-c"]


@pytest.mark.usefixtures("_n1_is_here")
def test_a_node_gets_its_gpus_whatever_the_job_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for job, options in (
        ("GPUS=a100:4,h100:4", ["--gpus=4"]),
        ("GPUS_PER_TASK=1 NTASKS=16 GPU_BIND=single:1", ["--gpus=8", "--gpu-bind=none"]),
        ("NTASKS_PER_GPU=1", []),
        ("CPUS_PER_TASK=2", []),
    ):
        with monkeypatch.context() as changed:
            for word in ("JOB_NUM_NODES=2", *job.split()):
                changed.setenv(*f"SLURM_{word}".split("="))
            host = srun_host("n1", "python")
        assert [word for word in host.command(7, "0") if word.startswith("--gpu")] == options
        assert f"SLURM_{job.partition('=')[0]}" in host.without


def test_an_allocation_without_nodes_is_refused() -> None:
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        allocated_hosts({"SLURM_JOB_ID": "7"})


def test_a_node_is_reached_at_slurms_address(programs: Programs) -> None:
    programs.put("scontrol", "echo NodeName=n1")
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        node_address("no-such-host.invalid")
    programs.put("scontrol", "echo NodeName=n1 NodeAddr=192.0.2.1 NodeHostName=n1")
    assert node_address("no-such-host.invalid") == "192.0.2.1"
    assert node_address("localhost") == "localhost"
