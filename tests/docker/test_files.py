"""What docker/ promises, read from its files; scripts/image-check builds and runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner

from zerokit.cli import cli
from zerokit.cli.bench import command as bench
from zerokit.launch.membership import Membership, find_membership

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PLACES = [path for path in sorted(DOCKER.rglob("*")) if path.is_file()]


def _instructions(file: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile in order, comments and line ends taken out."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in found]


INSTRUCTIONS = _instructions(DOCKER / "Dockerfile")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def _stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage."""
    starts = [n for n, (word, _) in enumerate(INSTRUCTIONS) if word == "FROM"] + [len(INSTRUCTIONS)]
    for start, stop in pairwise(starts):
        if INSTRUCTIONS[start][1].endswith(f" AS {name}"):
            return INSTRUCTIONS[start:stop]
    raise AssertionError(f"no stage {name}")


def _arguments() -> dict[str, str]:
    pairs = (rest.partition("=") for word, rest in INSTRUCTIONS if word == "ARG")
    # A stage that repeats an argument, without a value, means the one at the top.
    return {name: value for name, _, value in pairs if value or name != "BASE"}


def test_the_image_starts_zerokit_and_asks_the_doctor() -> None:
    last = dict(_stage("zerokit"))
    assert json.loads(last["ENTRYPOINT"]) == ["zerokit"]
    options, _, test = last["HEALTHCHECK"].partition("CMD ")
    assert json.loads(test) == ["zerokit", "doctor", "--quick"]
    assert "--interval=" in options


def test_base_and_torch_are_build_arguments_and_the_base_is_pinned() -> None:
    arguments = _arguments()
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", arguments["BASE"])
    assert {"TORCH_INDEX_URL", "TORCH_CONSTRAINT", "DEBIAN_PACKAGES"} <= arguments.keys()
    bases = {rest.split()[0] for word, rest in INSTRUCTIONS if word == "FROM"}
    stages = {rest.split()[-1] for word, rest in INSTRUCTIONS if word == "FROM"}
    assert bases - stages == {"${BASE}"}


def test_the_user_is_a_number_that_is_not_root() -> None:
    assert dict(_stage("runtime"))["USER"] == "10001:0"
    assert not [rest for word, rest in _stage("zerokit") + _stage("tracking-server") if word == "USER"]


def test_what_is_written_at_run_time_goes_where_anyone_may_write() -> None:
    runtime = dict(_stage("runtime"))
    variables = dict(one.split("=", 1) for one in shlex.split(runtime["ENV"]))
    for name in ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert variables[name].startswith("/tmp"), name
    assert (runtime["WORKDIR"], runtime["VOLUME"], runtime["STOPSIGNAL"]) == ("/runs", "/runs", "SIGTERM")


def test_the_build_sees_the_package_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    taken = {
        word
        for name in ("dependencies", "package")
        for instruction, rest in _stage(name)
        if instruction == "COPY"
        for word in rest.split()[:-1]
    }
    assert let_in == taken


@pytest.mark.parametrize("path", PLACES, ids=lambda path: str(path.relative_to(DOCKER)))
def test_no_interface_is_named_and_no_server_for_logins_is_run(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"SOCKET_IFNAME\s*[:=]", text)
    assert not re.search(r"\b(eth\d|ens\d|eno\d|enp\d\w*|ib\d|bond\d)\b", text)
    assert not re.search(r"\bsshd\b|openssh-server", text)


def _parses(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """zerokit's own command takes them."""
    with mock.patch.dict(os.environ, environment, clear=True):
        found = cli.get_command(
            cli.make_context("zerokit", ["--version"], resilient_parsing=True), arguments[0]
        )
        assert found is not None
        found.make_context(arguments[0], list(arguments[1:]))


def _member(environment: Mapping[str, str]) -> Membership:
    member = find_membership(environment)
    assert member is not None
    return member


@pytest.mark.parametrize("service", ["node-0", "node-1", "compare"])
def test_composes_commands_are_zerokits(service: str) -> None:
    assert "entrypoint" not in COMPOSE[service]
    _parses(COMPOSE[service]["command"], COMPOSE[service].get("environment", {}))


def test_composes_nodes_are_two_members_of_one_job() -> None:
    nodes = [COMPOSE["node-0"], COMPOSE["node-1"]]
    members = [_member(node["environment"]) for node in nodes]
    assert [(one.index, one.count, one.nodes, one.whole_node) for one in members] == [
        (0, 2, 2, True),
        (1, 2, 2, True),
    ]
    assert {one.master_addr for one in members} == {"node-0"}
    assert nodes[0]["command"] == nodes[1]["command"]


def test_compose_waits_for_health_and_keeps_the_root_read_only() -> None:
    assert COMPOSE["mlflow"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    for service in ("node-0", "node-1"):
        assert COMPOSE[service]["depends_on"]["mlflow"]["condition"] == "service_healthy"
    for service in ("postgres", "mlflow", "page"):
        assert COMPOSE[service]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    for service in ("node-0", "node-1", "compare", "page"):
        assert COMPOSE[service]["read_only"] is True


def test_the_page_that_is_served_is_the_one_that_is_made() -> None:
    written = Path(COMPOSE["compare"]["command"][-1])
    assert COMPOSE["page"]["command"][-1] == str(written.parent)
    assert written.name == "index.html"


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_manifests_are_what_the_command_in_them_prints(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCKER / f"kubernetes/{form}.yaml").read_text()
    command, *_ = text.splitlines()
    for name in list(os.environ):
        if name.startswith(("ZEROKIT_", "NCCL_", "GLOO_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    printed = CliRunner().invoke(cli, shlex.split(command.removeprefix("# zerokit ")))
    assert printed.exit_code == 0, printed.output
    assert printed.output == text
    manifests = {one["kind"]: one for one in yaml.safe_load_all(text)}
    if form == "trainjob":
        container = manifests["TrainJob"]["spec"]["trainer"]
    else:
        job = manifests["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        member = _member({one["name"]: one.get("value", "1") for one in container["env"]})
        assert (member.index, member.nodes, member.nproc_per_node) == (1, job["completions"], 8)
    _parses(container["args"], {"PET_NNODES": "2", "PET_NODE_RANK": "1"})


def test_slurms_script_is_what_the_command_in_it_prints() -> None:
    text = (DOCKER / "slurm/bench.sbatch").read_text()
    line = re.search(r"^# zerokit (.*)$", text, re.MULTILINE)
    assert line is not None
    printed = CliRunner().invoke(cli, [*shlex.split(line[1]), "--dry-run"])
    assert printed.exit_code == 0, printed.output
    assert printed.output == text
    started = re.search(r"^srun .* -m zerokit.cli (bench .*)$", text, re.MULTILINE)
    assert started is not None
    _parses(shlex.split(started[1]), {})


def test_the_launcher_of_all_of_these_is_one_of_the_benchs() -> None:
    launcher = next(one for one in bench.params if one.name == "launcher")
    assert "env" in getattr(launcher.type, "choices", ())
