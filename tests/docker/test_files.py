"""What docker/ promises, read from its files; scripts/image-check builds and runs them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from tests.submit.manifests import require_known
from zerokit.cli import cli

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_the_image_is_pinned_runs_zerokit_without_root_and_asks_the_doctor() -> None:
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    for line in (
        r"ARG BASE=docker\.io/library/python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}",
        r"USER 10001:0",
        r"VOLUME /runs",
        r"STOPSIGNAL SIGTERM",
        r'ENTRYPOINT \["zerokit"\]',
        r'HEALTHCHECK --interval=.* CMD \["zerokit", "doctor", "--quick"\]',
    ):
        assert re.search(rf"^{line}$", text, re.MULTILINE)


def test_inputs_are_pinned_by_digest() -> None:
    """Base images, Python packages but for torch, and the actions of the workflow."""
    images = [service["image"] for service in COMPOSE.values() if not service["image"].startswith("zerokit")]
    assert images
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images)
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(re.search(r"@[0-9a-f]{40}$", one) for one in used)
    pinned: dict[str, str] = {}
    for name in ("image", "build", "server"):
        text = (DOCKER / f"pins/{name}.txt").read_text().replace("\\\n", " ")
        for line in text.splitlines():
            match = re.fullmatch(
                r"([\w.-]+)==(\S+)( +--hash=sha256:[0-9a-f]{64})+",
                line.partition(" ; ")[0]
                + "".join(re.findall(r" +--hash=sha256:[0-9a-f]{64}", line.partition(" ; ")[2])),
            )
            assert match is not None, line
            pinned[match[1].lower()] = match[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", one)[0].lower() for one in project["dependencies"]} - {"torch"}
    assert needed <= pinned.keys()
    versions = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {name: versions.get(name, version) for name, version in pinned.items()} == pinned


def test_no_interface_is_named_and_no_server_for_logins_is_run() -> None:
    interface = r"SOCKET_IFNAME\s*[:=]|\b(eth\d|ens\d|eno\d|enp\d\w*|ib\d|bond\d)\b"
    for path in filter(Path.is_file, DOCKER.rglob("*")):
        assert not re.search(rf"{interface}|\bsshd\b|openssh-server", path.read_text()), path


def _parses(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """zerokit's own command takes them."""
    with mock.patch.dict(os.environ, environment, clear=True):
        found = cli.get_command(
            cli.make_context("zerokit", ["--version"], resilient_parsing=True), arguments[0]
        )
        assert found is not None
        found.make_context(arguments[0], list(arguments[1:]))


RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""What torchrun gives a rank."""


def _node(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int, str, str, int]:
    """What torchrun reads from its variables; its program is zerokit, with a command that it takes."""
    with mock.patch.dict(os.environ, environment):
        asked = get_args_parser().parse_args(words)
    assert (asked.no_python, asked.training_script) == (True, "zerokit")
    _parses(asked.training_script_args, RANK)
    return asked.nnodes, asked.node_rank, asked.nproc_per_node, asked.master_addr, asked.master_port


def test_composes_commands_are_zerokits_and_its_nodes_members_of_one_job() -> None:
    assert "entrypoint" not in COMPOSE["compare"]
    _parses(COMPOSE["compare"]["command"], {})
    found = []
    for node in ("node-0", "node-1"):
        assert COMPOSE[node]["entrypoint"][0] == "torchrun"
        words = [*COMPOSE[node]["entrypoint"][1:], *COMPOSE[node]["command"]]
        found.append(_node(words, COMPOSE[node]["environment"]))
    assert found == [("2", 0, "1", "node-0", 29500), ("2", 1, "1", "node-0", 29500)]
    assert COMPOSE["node-0"]["command"] == COMPOSE["node-1"]["command"]


def test_compose_waits_for_health_and_keeps_the_root_read_only() -> None:
    assert COMPOSE["mlflow"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    for service in ("node-0", "node-1"):
        assert COMPOSE[service]["depends_on"]["mlflow"]["condition"] == "service_healthy"
    for service in ("postgres", "mlflow", "page"):
        assert COMPOSE[service]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    for service in ("node-0", "node-1", "compare", "page"):
        assert COMPOSE[service]["read_only"] is True
    written = Path(COMPOSE["compare"]["command"][-1])  # the page that is served
    assert (COMPOSE["page"]["command"][-1], "index.html") == (str(written.parent), written.name)


def _printed(text: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """What the command in a file's comment prints, with the variables that the files show."""
    line = re.search(r"^# zerokit (.*)$", text, re.MULTILINE)
    assert line is not None
    for name in list(os.environ):
        if name.startswith(("ZEROKIT_", "NCCL_", "GLOO_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    name, *words = shlex.split(line[1])
    printed = CliRunner().invoke(cli, [name, *more, *words])
    assert printed.exit_code == 0, printed.output
    return printed.stdout


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_manifests_are_what_the_command_in_them_prints(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCKER / f"kubernetes/{form}.yaml").read_text()
    assert _printed(text, monkeypatch) == text
    manifests = {one["kind"]: one for one in yaml.safe_load_all(text)}
    if form == "trainjob":
        container = manifests["TrainJob"]["spec"]["trainer"]
        _node(container["args"], {})  # Kubeflow sets the variables
    else:
        job = manifests["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        variables = {one["name"]: one.get("value", "1") for one in container["env"]}
        first = "zerokit-bench-node-0-0.zerokit-bench"
        assert _node(container["args"], variables) == (str(job["completions"]), 1, "8", first, 29500)
    assert container["command"] == ["torchrun"]


def test_a_program_of_ones_own_runs_in_pods_as_the_benchmark_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the README. The same runtime, but for the program and its name."""
    text = (DOCKER / "kubernetes/train.yaml").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(next(block for block in blocks if "init_process_group" in block))
    monkeypatch.chdir(tmp_path)
    assert _printed(text, monkeypatch) == text
    made, bench = (
        {one["kind"]: one for one in yaml.safe_load_all((DOCKER / f"kubernetes/{form}.yaml").read_text())}
        for form in ("train", "trainjob")
    )
    for one in made.values():
        require_known(one)
    trainer = made["TrainJob"]["spec"]["trainer"]
    assert (trainer["command"], trainer["args"]) == (["torchrun"], ["/program/train.py"])
    assert made["TrainJob"]["spec"]["runtimeRef"]["name"] == made["TrainingRuntime"]["metadata"]["name"]
    alike = ("image", "numNodes", "numProcPerNode", "resourcesPerNode")
    assert [trainer[name] for name in alike] == [bench["TrainJob"]["spec"]["trainer"][name] for name in alike]
    runtimes = [one["TrainingRuntime"]["spec"] for one in (made, bench)]
    pods = [
        one["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        for one in runtimes
    ]
    pods[0]["volumes"].remove({"name": "program", "configMap": {"name": "train"}})
    pods[0]["containers"][0]["volumeMounts"].remove({"name": "program", "mountPath": "/program"})
    assert runtimes[0] == runtimes[1]


def test_slurm_starts_a_program_of_ones_own_on_every_node(tmp_path: Path) -> None:
    """With programs in the place of Slurm's."""
    for name, line in (("scontrol", "printf 'node-a\\nnode-b\\n'"), ("srun", 'echo "$OMP_NUM_THREADS" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_ON_NODE": "32",
        "SLURM_JOB_ID": "12345",
    }
    done = subprocess.run(
        ["bash", "-eu", DOCKER / "slurm/train.sbatch"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "4 --cpus-per-task=32 --kill-on-bad-exit=1 python -P -m torch.distributed.run --nnodes 2 --nproc-per-node 8 "
        "--rdzv-backend c10d --rdzv-endpoint node-a:22345 --rdzv-id 12345 train.py\n"
    )


@pytest.mark.parametrize("name", ["bench", "train"])
def test_slurms_scripts_are_what_the_command_in_them_prints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCKER / f"slurm/{name}.sbatch").read_text()
    assert _printed(text, monkeypatch, "--dry-run") == text
    if started := re.search(r"^srun .* -P -m zerokit (bench .*)$", text, re.MULTILINE):
        _parses(shlex.split(started[1]), {})
    assert (started is None) == (name == "train")
