"""The work of scripts/image-check: podman builds docker/Dockerfile and runs the image and docker/compose.yaml.

    base        debootstrap makes a Debian with Python: registries of images need not be reachable
    image       the Dockerfile is built on it; its layers are compared with the limits below
    runs        the image runs without network, with a read-only root, under a user id that it has never seen
    compose     podman-compose starts the services of compose.yaml; PostgreSQL is Debian's, in an image made here

Images, containers, volumes and networks lie in a storage of this program's own. It is removed at the end, unless
--keep names a place for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import plain_table  # noqa: E402

CANNOT_RUN = 4

# Unpacked, apart from the base: a CPU image that takes longer to pull than to start helps nobody.
IMAGE_LIMIT_BYTES = 1_400_000_000
# A change of zerokit's sources must not move its dependencies.
OWN_LAYER_LIMIT_BYTES = 10_000_000

PACKAGES = {
    "podman": "podman crun conmon catatonit netavark aardvark-dns iptables",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
}
"""Debian packages by a program of theirs."""
BASE_PACKAGES = "python3,python3-venv,ca-certificates,binutils"
BASE, IMAGE, SERVER, POSTGRES = (
    "localhost/zerokit-check-base",
    "localhost/zerokit",
    "localhost/zerokit-tracking-server",
    "docker.io/library/postgres:17",
)
POSTGRES_START = """\
set -eu
programs=$(echo /usr/lib/postgresql/*/bin)
data=/var/lib/postgresql/data
as="setpriv --reuid=postgres --regid=postgres --init-groups"
install --directory --owner postgres --mode 700 $data
install --owner postgres --mode 600 /dev/null /password
echo "$POSTGRES_PASSWORD" >/password
$as "$programs/initdb" --pgdata=$data --username="$POSTGRES_USER" --pwfile=/password --auth-host=scram-sha-256 \\
    --encoding=UTF8 --locale=C.UTF-8 --no-sync
echo "host all all all scram-sha-256" >>$data/pg_hba.conf
$as "$programs/pg_ctl" --pgdata=$data --wait --options="-c listen_addresses=''" start
$as "$programs/createdb" --username="$POSTGRES_USER" "$POSTGRES_DB"
$as "$programs/pg_ctl" --pgdata=$data --wait stop
exec $as "$programs/postgres" -D $data -c listen_addresses='*'
"""
"""What the official image's entry point does with its three variables."""

# Neither the image's own user nor one that its /etc/passwd lists.
STRANGER = 54_321

NOT_TRIED = (
    "the default base image by its digest, and CUDA wheels: only package registries are assumed to be reachable",
    "Docker's and Kubernetes' own engines",
    "devices, InfiniBand, NVIDIA's container toolkit: flags of docker/README.md",
    "published ports: the page and MLflow are asked for from another container",
)


class CheckFailed(Exception):
    """What was expected and what was found."""


@dataclass(slots=True)
class Table:
    """The rows of the table at the end."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def check(self, name: str, work: Callable[[], str]) -> bool:
        """Run one check; it returns a detail for the table or raises `CheckFailed`."""
        print(f"image-check: {name}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            found, detail = "ok", work()
        except CheckFailed as error:
            found, detail = "FAILED", str(error)
        except subprocess.TimeoutExpired as error:
            found, detail = "FAILED", f"not finished after {error.timeout:.0f} s"
        self.rows.append((name, found, f"{time.monotonic() - started:.0f}", detail.splitlines()[0]))
        if found != "ok":
            print(detail, file=sys.stderr, flush=True)
        return found == "ok"


def must(command: Sequence[str], *, timeout: float = 600, given: str | None = None) -> str:
    """The stdout of a command that has to succeed; `given` is its stdin."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, input=given)
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-3000:].strip()
        raise CheckFailed(
            f"{Path(command[0]).name} ended with {done.returncode}: {text.splitlines()[-1:]}\n"
            f"{shlex.join(command)}\n{text}"
        )
    return done.stdout


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"{what} not seen within {seconds:.0f} s")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with a storage of its own, as one program that podman-compose can call, too."""

    program: Path

    @classmethod
    def write(cls, storage: Path, scratch: Path) -> Podman:
        """Write the program into `scratch`."""
        # Limits of the engine's default may lie above what this process may set.
        settings = scratch / "containers.conf"
        settings.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n')
        podman = f"podman --root {storage / 'images'} --runroot {storage / 'run'} --events-backend file"
        program = scratch / "podman"
        program.write_text(f'#!/bin/sh\nexport CONTAINERS_CONF={settings}\nexec {podman} "$@"\n')
        program.chmod(0o755)
        return cls(program)

    def __call__(self, *arguments: str, timeout: float = 600, given: str | None = None) -> str:
        return must([str(self.program), *arguments], timeout=timeout, given=given)

    def sizes(self, image: str) -> list[int]:
        """Unpacked bytes of an image's layers, the lowest first."""
        layers = json.loads(self("history", "--format=json", image))
        return [int(layer["size"]) for layer in layers][::-1]

    def describe(self, kind: str, name: str) -> dict[str, Any]:
        """What podman says of an image, a container or a volume."""
        found: dict[str, Any] = json.loads(self(kind, "inspect", name))[0]
        return found

    def log(self, container: str) -> str:
        """The end of what a container printed."""
        done = subprocess.run(
            [self.program, "logs", container],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.stdout[-2500:]

    def ends(self, container: str, seconds: float) -> int:
        """The exit code of a container that has to end by itself."""
        return int(self("wait", container, timeout=seconds))


def enter_own_view() -> None:
    """Begin anew in a mount namespace with the cgroups that crun accepts, where the machine has others."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return
    view = 'umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", view, "sh", sys.executable, *sys.argv])


def pip_settings(scratch: Path) -> tuple[list[str], bool]:
    """Options of `podman build` that lend it this machine's pip configuration, and whether there is any.

    It goes in as a secret and as mounts, neither of which leaves a trace in the image.
    """
    lines = must([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    settings: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        # The last of several places wins; the environment's are named first, and win over all files.
        key = name.rpartition(".")[2]
        if name.startswith(":env:") or f":env:.{key}" not in "".join(lines):
            settings[key] = value.strip("'\"").replace("\\n", " ")
    wanted = {
        "cert",
        "find-links",
        "index-url",
        "extra-index-url",
        "trusted-host",
        "proxy",
        "default-timeout",
    }
    settings = {key: value for key, value in settings.items() if key in wanted}
    if not settings:
        return [], False
    file = scratch / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    file.chmod(0o600)
    options = ["--secret", f"id=pip,src={file}"]
    for path in {Path(word.removeprefix("file://")) for value in settings.values() for word in value.split()}:
        if path.is_absolute() and path.exists():
            # An index made of relative links needs its neighbours, too.
            place = path.parent if path.name == "simple" else path
            options += ["--volume", f"{place}:{place}:ro"]
    return options, "find-links" in settings or "index-url" in settings


def make_base(podman: Podman, scratch: Path, mirror: str | None) -> str:
    """Debian with Python, as an image."""
    if BASE in podman("images", "--format={{.Repository}}").split():
        return "kept from an earlier run"
    if mirror is None:
        targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
        mirror = next(iter(must(targets).split()), None)
        if mirror is None:
            raise CheckFailed("apt-get knows no mirror of Debian; give --mirror")
    root, archive = scratch / "base", scratch / "base.tar"
    include = f"--include={BASE_PACKAGES}"
    must(["debootstrap", "--variant=minbase", include, "bookworm", str(root), mirror], timeout=1800)
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
    must(["tar", "--create", "--file", str(archive), "--directory", str(root), "."])
    podman("import", "--quiet", str(archive), BASE)
    shutil.rmtree(root)
    archive.unlink()
    return "Debian bookworm, Python and binutils"


def build(podman: Podman, image: str, target: str, options: Sequence[str]) -> str:
    """Build one target of the Dockerfile."""
    command = ["build", "--isolation=chroot", "--layers", "--format=docker", f"--build-arg=BASE={BASE}"]
    command += [f"--target={target}", f"--tag={image}", *options, f"--file={ROOT / 'docker/Dockerfile'}"]
    podman(*command, str(ROOT), timeout=3600)
    return f"target {target}"


def make_postgres(podman: Podman, scratch: Path) -> str:
    """An image with Debian's PostgreSQL under the name that compose.yaml asks for."""
    place = scratch / "postgres"
    place.mkdir()
    (place / "start").write_text(f"#!/bin/sh\n{POSTGRES_START}")
    (place / "start").chmod(0o755)
    (place / "Dockerfile").write_text(
        f"FROM {BASE}\nRUN apt-get update && apt-get install --yes --no-install-recommends postgresql\n"
        'COPY start /start\nENTRYPOINT ["/start"]\n'
    )
    podman("build", "--isolation=chroot", "--format=docker", f"--tag={POSTGRES}", str(place), timeout=1800)
    return f"{POSTGRES}: Debian's in its place"


def compare_size(what: str, size_bytes: int, limit_bytes: int) -> str:
    """A size beside its limit; raises `CheckFailed` if it is larger."""
    text = f"{size_bytes / 1e6:,.1f} MB {what}; limit {limit_bytes / 1e6:,.0f} MB"
    if size_bytes > limit_bytes:
        raise CheckFailed(text)
    return text


@dataclass(slots=True)
class Runs:
    """The image started in the ways that matter, one after the other, with one volume at /runs."""

    podman: Podman
    volume: Path
    count: int = 0

    @classmethod
    def prepare(cls, podman: Podman) -> Runs:
        """Make the volume."""
        podman("volume", "create", "zerokit-check")
        return cls(podman, Path(podman.describe("volume", "zerokit-check")["Mountpoint"]))

    def begin(self, *arguments: str, entrypoint: str | None = None) -> str:
        """Start the image under the unknown user id; the container's name."""
        self.count += 1
        name = f"zerokit-check-{self.count}"
        options = [
            f"--name={name}",
            "--cgroups=disabled",
            "--network=none",
            "--read-only",
            f"--user={STRANGER}:0",
        ]
        options += [
            "--volume=zerokit-check:/runs",
            *([] if entrypoint is None else [f"--entrypoint={entrypoint}"]),
        ]
        self.podman("run", "--detach", *options, IMAGE, *arguments)
        return name

    def whole(self, *arguments: str, entrypoint: str | None = None) -> str:
        """What a run that has to succeed printed."""
        name = self.begin(*arguments, entrypoint=entrypoint)
        code = self.podman.ends(name, 600)
        if code != 0:
            raise CheckFailed(f"{' '.join(arguments)}: exit code {code}\n{self.podman.log(name)}")
        return self.podman.log(name)

    def is_confined(self) -> str:
        """The ways in which this run is stricter than a plain `docker run` are really there."""
        script = "import os; print(os.getpid(), os.getuid()); open('/opt/zerokit/x', 'w')"
        name = self.begin("-c", script, entrypoint="python")
        code, said = self.podman.ends(name, 60), self.podman.log(name)
        if code == 0 or f"1 {STRANGER}" not in said or "Read-only file system" not in said:
            raise CheckFailed(f"expected process 1 of user {STRANGER} on a read-only root, found:\n{said}")
        return f"process 1, user id {STRANGER}, read-only root, no network"

    def modules(self) -> str:
        """Nothing imports what the Dockerfile has cut away."""
        wanted = (
            "torch, torch.distributed.run, torch._dynamo, numpy.testing, scipy.stats, scipy.optimize, pandas, "
            "sklearn.linear_model, matplotlib.pyplot, altair, vl_convert, pyarrow.parquet, mlflow.server, sympy, "
            "networkx"
        )
        self.whole("-c", f"import {wanted}", entrypoint="python")
        return f"{len(wanted.split(', '))} modules are imported"

    def two_nodes(self) -> str:
        """A bench over two simulated nodes that saves a checkpoint and logs to MLflow."""
        asked = "bench --model gpt-tiny --seq-len 64 --nodes 2 --steps 5 --save run --output record.json"
        self.whole(*asked.split())
        status = json.loads((self.volume / "record.json").read_text())["status"]
        if (found := (status, self.mlflow_statuses())) != ("ok", ["FINISHED"]):
            raise CheckFailed(f"the record and MLflow say {found}")
        return "record ok, MLflow run FINISHED"

    def reshard(self) -> str:
        """The checkpoint cut for three ranks, verified, and equal to its source."""
        for asked in ("reshard run --to 3 --output run-3", "verify run-3", "diff run run-3"):
            self.whole(*asked.split())
        return "two ranks to three, verified, no difference"

    def health(self) -> str:
        """The image's own health check."""
        _, program, *arguments = self.podman.describe("image", IMAGE)["Healthcheck"]["Test"]
        self.whole(*arguments, entrypoint=program)
        return shlex.join([program, *arguments])

    def stopped_at_once(self) -> str:
        """SIGTERM during the imports, when zerokit has no handler yet."""
        asked = "bench --model gpt-5m --nodes 2 --steps 100000 --no-mlflow --no-twin"
        name = self.begin(*asked.split())
        # The first process makes the second a few hundredths of a second after Python has started.
        until(lambda: len(processes_of(STRANGER)) == 2, 20, "two processes")
        code, taken = self._stop(name)
        if code != 128 + signal.SIGTERM or taken > 10:
            raise CheckFailed(f"exit code {code} after {taken:.1f} s, expected 143 within docker's 10 s")
        return f"exit code 143 after {taken:.1f} s"

    def stopped_in_the_middle(self) -> str:
        """SIGTERM while ranks train: they end, the record is kept, and MLflow has the end of the run."""
        asked = "bench --model gpt-5m --nodes 2 --steps 100000 --no-twin --output killed.json"
        name = self.begin(*asked.split())
        until(lambda: ranks_of(STRANGER) == 2, 120, "two ranks")
        time.sleep(15)  # into the steps
        if self.podman.describe("container", name)["State"]["Status"] != "running":
            raise CheckFailed(f"it ended by itself\n{self.podman.log(name)}")
        code, taken = self._stop(name)
        status = json.loads((self.volume / "killed.json").read_text())["status"]
        found = (code, status, self.mlflow_statuses().count("KILLED"), ranks_of(STRANGER))
        if found != (143, "killed", 1, 0):
            raise CheckFailed(f"exit code, record, KILLED runs, ranks left: {found}\n{self.podman.log(name)}")
        return f"after {taken:.1f} s: ranks gone, record killed, MLflow run KILLED"

    def _stop(self, name: str) -> tuple[int, float]:
        self.podman("kill", "--signal=TERM", name)
        started = time.monotonic()
        return self.podman.ends(name, 60), time.monotonic() - started

    def mlflow_statuses(self) -> list[str]:
        """The runs of the SQLite store that the image's user made in the volume."""
        with contextlib.closing(
            sqlite3.connect(f"file:{self.volume / 'mlflow.db'}?mode=ro", uri=True)
        ) as database:
            return [row[0] for row in database.execute("select status from runs order by start_time")]


def processes_of(user: int) -> list[list[bytes]]:
    """The command lines of a user id's processes: seen from outside, whatever namespace they are in."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == user:
                found.append((directory / "cmdline").read_bytes().split(b"\0"))
    return found


def ranks_of(user: int) -> int:
    """How many of them are ranks; an agent names the rank's module too, as an argument of torchrun."""
    return sum(words[2:4] == [b"-m", b"zerokit.launch.rank"] for words in processes_of(user))


@dataclass(slots=True)
class Compose:
    """The services of docker/compose.yaml under podman-compose, started one by one when their turn has come."""

    podman: Podman
    services: dict[str, dict[str, Any]]
    file: Path

    @classmethod
    def read(cls, podman: Podman, scratch: Path) -> Compose:
        """Take the file as it is, but for what is built already and for ports of this machine."""
        content = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
        for service in content["services"].values():
            service.pop("build", None)
            service.pop("ports", None)
        file = scratch / "compose.yaml"
        file.write_text(yaml.safe_dump(content))
        return cls(podman, content["services"], file)

    def __call__(self, *arguments: str, timeout: float = 600) -> str:
        options = [
            f"--podman-path={self.podman.program}",
            "--podman-run-args=--cgroups=disabled",
            "--in-pod=false",
        ]
        command = [sys.executable, "-m", "podman_compose", *options, "--project-name=zerokit"]
        return must([*command, f"--file={self.file}", *arguments], timeout=timeout)

    def start(self, service: str) -> str:
        """Start a service once those it depends on are as it wants them."""
        # podman's own health checks are timers of systemd, which a container of CI has not.
        for other, condition in self.services[service].get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                until(partial(self.healthy, other), 180, f"a healthy {other}")
            else:
                self.succeeds(other)
        self("up", "--detach", "--no-deps", service)
        return str(self.services[service]["image"])

    def healthy(self, service: str) -> bool:
        """The service's health check of the compose file."""
        container = self._container(service)
        if self.podman.describe("container", container)["State"]["Status"] != "running":
            raise CheckFailed(f"{service} is not running\n{self.podman.log(container)}")
        done = subprocess.run(
            [self.podman.program, "healthcheck", "run", container], check=False, capture_output=True
        )
        return done.returncode == 0

    def succeeds(self, service: str) -> None:
        """Wait for a service that ends by itself."""
        container = self._container(service)
        if (code := self.podman.ends(container, 600)) != 0:
            raise CheckFailed(f"{service} ended with {code}\n{self.podman.log(container)}")

    def _container(self, service: str) -> str:
        return f"zerokit_{service}_1"

    def trained(self) -> str:
        """Both nodes ended well, and their record is one of two ranks on two nodes."""
        for service in ("node-0", "node-1"):
            self.succeeds(service)
        place = Path(self.podman.describe("volume", "zerokit_runs")["Mountpoint"])
        records = [json.loads(path.read_text()) for path in (place / "two-nodes").glob("*.json")]
        found = [(one["status"], one["settings"]["nodes"], one["settings"]["stage"]) for one in records]
        if found != [("ok", 2, 2)]:
            raise CheckFailed(f"status, nodes and stage of the records: {found}")
        return "one record of two nodes"

    def tracked(self) -> str:
        """The run lies in PostgreSQL."""
        query = ["psql", "--username=mlflow", "--tuples-only", "--command=select status from runs", "mlflow"]
        found = self.podman("exec", self._container("postgres"), *query).split()
        if found != ["FINISHED"]:
            raise CheckFailed(f"PostgreSQL holds runs {found}")
        return "one run, FINISHED, in PostgreSQL"

    def shown(self) -> str:
        """The page is served to other hosts, and says what was compared."""
        until(partial(self.healthy, "page"), 60, "a healthy page")
        script = "import urllib.request; print(urllib.request.urlopen('http://page:8000/').read().decode())"
        page = self.podman("exec", self._container("mlflow"), "python", "-c", script)
        if "gpt-5m" not in page or "<svg" not in page:
            raise CheckFailed("the page does not show the model that was trained")
        return f"{len(page) / 1e3:.0f} kB from another host"


def check_image(table: Table, podman: Podman) -> None:
    """Everything about one container."""
    runs = Runs.prepare(podman)
    table.check("image: confined", runs.is_confined)
    table.check("image: modules", runs.modules)
    if table.check("image: bench on two nodes", runs.two_nodes):
        table.check("image: reshard", runs.reshard)
    table.check("image: health check", runs.health)
    table.check("image: SIGTERM at the start", runs.stopped_at_once)
    table.check("image: SIGTERM in a bench", runs.stopped_in_the_middle)


def check_compose(table: Table, podman: Podman, scratch: Path) -> None:
    """Everything about the compose file."""
    if not table.check("compose: PostgreSQL", partial(make_postgres, podman, scratch)):
        return
    compose = Compose.read(podman, scratch)
    for service in ("postgres", "mlflow", "node-0", "node-1"):
        if not table.check(f"compose: {service} starts", partial(compose.start, service)):
            return
    if not table.check("compose: the nodes train", compose.trained):
        return
    table.check("compose: MLflow", compose.tracked)
    if all(table.check(f"compose: {one} starts", partial(compose.start, one)) for one in ("compare", "page")):
        table.check("compose: the page", compose.shown)


@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[tuple[Podman, Path]]:
    """podman and a scratch folder; the latter always goes, images only stay in `keep`."""
    with tempfile.TemporaryDirectory(prefix="zerokit-image-check-", dir="/var/tmp") as scratch:
        # Ranks of any user id pass through it on the way to their volumes.
        os.chmod(scratch, 0o711)
        place = (keep or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        podman = Podman.write(place, Path(scratch))
        try:
            yield podman, Path(scratch)
        finally:
            podman("rm", "--all", "--force", "--time=0", "--volumes")
            podman("volume", "prune", "--force")
            podman("network", "prune", "--force")
            if keep is None:
                podman("rmi", "--all", "--force")


def main() -> int:
    """Run all checks; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/image-check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep images there, for a faster next time")
    parser.add_argument("--install", action="store_true", help="install missing Debian packages with apt-get")
    parser.add_argument(
        "--mirror", metavar="URL", help="Debian's mirror; default: the first that apt-get uses here"
    )
    parser.add_argument(
        "--torch-index",
        metavar="URL",
        help="where torch's wheels are; default: the Dockerfile's, or pip's own places where pip is configured here",
    )
    parser.add_argument(
        "--only", choices=("image", "compose"), help="run only these checks of the built image"
    )
    asked = parser.parse_args()
    if os.geteuid() != 0 or sys.platform != "linux":
        print("image-check: needs root on Linux, for namespaces and mounts", file=sys.stderr)
        return CANNOT_RUN
    missing = " ".join(packages for program, packages in PACKAGES.items() if shutil.which(program) is None)
    if missing and asked.install:
        must(["apt-get", "update"])
        must(["apt-get", "install", "--yes", "--no-install-recommends", *missing.split()], timeout=1800)
    elif missing:
        print(f"image-check: first run apt-get install {missing}, or give --install", file=sys.stderr)
        return CANNOT_RUN
    enter_own_view()
    # So that whatever ends this cleans up on the way.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    table = Table()
    with workplace(asked.keep) as (podman, scratch):
        _check_all(table, podman, scratch, asked)
    print(plain_table("image-check", ("check", "result", "seconds", "found"), table.rows))
    print("\nNot tried here:", *NOT_TRIED, sep="\n- ")
    return 1 if any(row[1] != "ok" for row in table.rows) else 0


def _check_all(table: Table, podman: Podman, scratch: Path, asked: argparse.Namespace) -> None:
    options, configured = pip_settings(scratch)
    index = asked.torch_index if asked.torch_index is not None else ("" if configured else None)
    if index is not None:
        options.append(f"--build-arg=TORCH_INDEX_URL={index}")
    steps: list[tuple[str, Callable[[], str]]] = [
        ("base", partial(make_base, podman, scratch, asked.mirror)),
        ("build: image", partial(build, podman, IMAGE, "zerokit", options)),
        ("build: tracking server", partial(build, podman, SERVER, "tracking-server", options)),
    ]
    if not all(table.check(name, work) for name, work in steps):
        return
    above = podman.sizes(IMAGE)[len(podman.sizes(BASE)) :]
    table.check("size: image", lambda: compare_size("apart from its base", sum(above), IMAGE_LIMIT_BYTES))
    table.check("size: zerokit's layer", lambda: compare_size("in it", above[-1], OWN_LAYER_LIMIT_BYTES))
    if asked.only != "compose":
        check_image(table, podman)
    if asked.only != "image":
        check_compose(table, podman, scratch)


if __name__ == "__main__":
    sys.exit(main())
