"""The work of scripts/image-check: docker/ is built and run with buildah and crun, which need no daemon.

    base        debootstrap makes a Debian with Python: registries of images need not be reachable
    image       buildah builds the Dockerfile on it; layers are held against the bars below
    runs        crun starts the image as an engine would: no network, read-only root, a user id that it has never seen
    compose     the services of compose.yaml, each in a network namespace of its own on one bridge, from that file's
                commands, environment, volumes and health checks; PostgreSQL alone is this machine's Debian package

What this leaves out is said at the end. Everything it made is removed, but for what --keep names.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import plain_table  # noqa: E402

CANNOT_RUN = 4

# Unpacked, apart from the base: a CPU form that takes longer to pull than to start helps nobody.
IMAGE_BAR_BYTES = 1_300_000_000
# A change of zerokit's sources must not move its dependencies.
OWN_LAYER_BAR_BYTES = 10_000_000

TOOLS = {
    "buildah": "buildah",
    "crun": "crun",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "setpriv": "util-linux",
    "pg_config": "postgresql libpq-dev",
}
BASE_PACKAGES = "python3,python3-venv,ca-certificates,binutils"
BASE = "localhost/zerokit-check-base"
IMAGE = "localhost/zerokit-check"
SERVER = "localhost/zerokit-check-tracking-server"

# Neither the image's own user nor one that its /etc/passwd knows.
STRANGER = 54_321
SUBNET = "10.213.77"

NOT_TRIED = (
    "the default base image by its digest, and CUDA wheels: only package registries are assumed to be reachable",
    "docker's and Kubernetes' own engines: crun runs what they would hand to it",
    "devices, InfiniBand, NVIDIA's container toolkit: flags of docker/README.md",
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
            found, detail = "FAILED", f"not done after {error.timeout:.0f} s"
        self.rows.append((name, found, f"{time.monotonic() - started:.0f}", detail.splitlines()[0]))
        if found != "ok":
            print(detail, file=sys.stderr, flush=True)
        return found == "ok"

    @property
    def failed(self) -> bool:
        """Whether any row is not ok."""
        return any(row[1] != "ok" for row in self.rows)


def run(
    command: Sequence[str], *, timeout: float = 600, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed; its exit code is the caller's business."""
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(environment or {})},
    )


def must(command: Sequence[str], *, timeout: float = 600) -> str:
    """The stdout of a command that has to succeed."""
    done = run(command, timeout=timeout)
    if done.returncode != 0:
        raise CheckFailed(
            f"{' '.join(command)[:120]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
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
class Store:
    """buildah with a storage of its own, so that no other image is touched."""

    place: Path
    driver: str

    def command(self, *arguments: str) -> list[str]:
        """A buildah command."""
        return [
            "buildah",
            "--root",
            str(self.place / "storage"),
            "--runroot",
            str(self.place / "run"),
            "--storage-driver",
            self.driver,
            *arguments,
        ]

    def layers(self, image: str) -> list[int]:
        """Unpacked bytes of an image's layers, the lowest first."""
        root = self.place / "storage"
        layers = {
            one["id"]: one for one in json.loads((root / f"{self.driver}-layers/layers.json").read_text())
        }
        images = json.loads((root / f"{self.driver}-images/images.json").read_text())
        layer = next(one["layer"] for one in images if f"{image}:latest" in one.get("names", ()))
        sizes = []
        while layer:
            sizes.append(int(layers[layer]["diff-size"]))
            layer = layers[layer].get("parent")
        return sizes[::-1]

    def config(self, image: str) -> dict[str, Any]:
        """What the image says of itself: user, environment, entry point, health check."""
        inspected = json.loads(must(self.command("inspect", "--type", "image", image)))
        found: dict[str, Any] = inspected["Docker"]["config"]
        return found


def pip_settings(scratch: Path) -> tuple[list[str], bool]:
    """Options of `buildah build` that lend it this machine's pip configuration, and whether there is any.

    It goes in as a secret and as mounts, neither of which leaves a trace in the image.
    """
    lines = run([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    settings: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        # Of several places the last named wins; the environment's are named first, and win over all files.
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


def build_base(store: Store, mirror: str | None) -> str:
    """Debian with Python, as an image."""
    if BASE in must(store.command("images", "--format", "{{.Name}}")):
        return "kept from an earlier run"
    root = store.place / "base"
    shutil.rmtree(root, ignore_errors=True)
    if mirror is None:
        mirrors = must(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]).split()
        if not mirrors:
            raise CheckFailed("apt-get knows no mirror of Debian; give --mirror")
        mirror = mirrors[0]
    must(
        ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root), mirror],
        timeout=1800,
    )
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
    container = must(store.command("from", "scratch")).strip()
    must(store.command("add", "--quiet", container, str(root), "/"))
    must(store.command("commit", "--quiet", "--rm", container, BASE))
    shutil.rmtree(root)
    return "Debian bookworm, Python and binutils"


def build(store: Store, target: str, image: str, options: Sequence[str], torch_index: str | None) -> str:
    """Build one target of the Dockerfile."""
    command = store.command("build", "--isolation", "chroot", "--layers", "--format", "docker")
    command += ["--target", target, "--tag", image, "--build-arg", f"BASE={BASE}", *options]
    if torch_index is not None:
        command += ["--build-arg", f"TORCH_INDEX_URL={torch_index}"]
    must([*command, "--file", str(ROOT / "docker/Dockerfile"), str(ROOT)], timeout=3600)
    return f"target {target}"


def size_of_image(store: Store) -> str:
    """The layers above the base against the bar."""
    above = store.layers(IMAGE)[len(store.layers(BASE)) :]
    text = f"{sum(above) / 1e6:,.0f} MB apart from its base; bar {IMAGE_BAR_BYTES / 1e6:,.0f} MB"
    if sum(above) > IMAGE_BAR_BYTES:
        raise CheckFailed(text)
    return text


def size_of_own_layer(store: Store) -> str:
    """The last layer against the bar."""
    last = store.layers(IMAGE)[-1]
    text = f"{last / 1e6:.1f} MB; bar {OWN_LAYER_BAR_BYTES / 1e6:.0f} MB"
    if last > OWN_LAYER_BAR_BYTES:
        raise CheckFailed(text)
    return text


@dataclass(slots=True)
class Image:
    """An image whose files are mounted somewhere, and what it says of itself."""

    root: Path
    config: Mapping[str, Any]
    container: str

    @classmethod
    def mount(cls, store: Store, name: str) -> Image:
        """Lay the image's layers over each other."""
        container = must(store.command("from", name)).strip()
        root = Path(must(store.command("mount", container)).strip())
        return cls(root, store.config(name), container)


@dataclass(slots=True)
class Container:
    """One run of an image under crun, with its root read-only."""

    name: str
    image: Image
    scratch: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.scratch / f"{self.name}.log"

    def start(
        self,
        arguments: Sequence[str] | None,
        *,
        entrypoint: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        user: int | None = None,
        mounts: Sequence[Mapping[str, Any]] = (),
        network: str | None = None,
        shm: str = "64m",
        hosts: Path | None = None,
    ) -> None:
        """Start it, with docker's rules for entry point, command and environment."""
        bundle = self.scratch / f"bundle-{self.name}"
        bundle.mkdir()
        must(["sh", "-c", 'cd "$1" && crun spec', "sh", str(bundle)])
        config = json.loads((bundle / "config.json").read_text())
        variables = dict(one.split("=", 1) for one in self.image.config["Env"])
        variables |= environment or {}
        command = list(self.image.config.get("Cmd") or ()) if arguments is None else list(arguments)
        own_user, own_group = self.image.config["User"].split(":")
        config["process"].update(
            terminal=False,
            user={"uid": int(own_user) if user is None else user, "gid": int(own_group)},
            cwd=self.image.config["WorkingDir"],
            env=[f"{name}={value}" for name, value in variables.items()],
            args=[*(self.image.config["Entrypoint"] if entrypoint is None else entrypoint), *command],
        )
        config["root"] = {"path": str(self.image.root), "readonly": True}
        kept = [
            one for one in config["mounts"] if one["type"] != "cgroup" and one["destination"] != "/dev/shm"
        ]
        kept.append(tmpfs("/dev/shm", f"size={shm}"))
        if hosts is not None:
            kept.append(bind(hosts, "/etc/hosts", read_only=True))
        config["mounts"] = [*kept, *mounts]
        kinds: list[dict[str, str]] = [{"type": one} for one in ("pid", "mount", "ipc", "uts")]
        kinds.append({"type": "network"} | ({"path": f"/run/netns/{network}"} if network else {}))
        config["linux"]["namespaces"] = kinds
        config["linux"].pop("resources", None)
        (bundle / "config.json").write_text(json.dumps(config))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._crun("run", "--bundle", str(bundle), self.name),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _crun(self, *arguments: str) -> list[str]:
        # crun wants to know the kind of cgroups even when it is told to leave them alone, and refuses some.
        view = 'umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec "$@"'
        crun = ["crun", "--root", str(self.scratch / "crun"), "--cgroup-manager=disabled"]
        return ["unshare", "--mount", "sh", "-c", view, "sh", *crun, *arguments]

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as a health check is."""
        return run(self._crun("exec", self.name, *command), timeout=60)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its first process, as `docker stop` does."""
        must(self._crun("kill", self.name, str(int(number))))

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(timeout=seconds)

    def end(self) -> None:
        """Kill it, if it lives."""
        if self.process is not None and self.process.poll() is None:
            run(self._crun("kill", self.name, "9"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        run(self._crun("delete", "--force", self.name))

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-2500:]


def tmpfs(destination: str, *options: str) -> dict[str, Any]:
    """A mount in memory, writable for all."""
    return {
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["mode=1777", *options],
    }


def bind(source: Path, destination: str, *, read_only: bool = False) -> dict[str, Any]:
    """A mount of a folder or a file of this machine."""
    return {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": ["bind", "ro" if read_only else "rw"],
    }


@dataclass(slots=True)
class Runs:
    """The image started in the ways that matter, one after the other, with one volume at /runs."""

    image: Image
    scratch: Path
    volume: Path
    count: int = 0
    alive: list[Container] = field(default_factory=list)

    def begin(self, arguments: Sequence[str], *, entrypoint: Sequence[str] | None = None) -> Container:
        """Start the image as a stranger."""
        self.count += 1
        container = Container(f"zerokit-check-{os.getpid()}-{self.count}", self.image, self.scratch)
        self.alive.append(container)
        container.start(
            arguments,
            entrypoint=entrypoint,
            user=STRANGER,
            mounts=[tmpfs("/tmp"), bind(self.volume, "/runs")],
        )
        return container

    def whole(
        self, arguments: Sequence[str], *, entrypoint: Sequence[str] | None = None, seconds: float = 300
    ) -> str:
        """What a run that has to succeed printed."""
        container = self.begin(arguments, entrypoint=entrypoint)
        code = container.wait(seconds)
        if code != 0:
            raise CheckFailed(f"{' '.join(arguments)}: exit code {code}\n{container.tail()}")
        return container.log.read_text(errors="replace")

    def is_confined(self) -> str:
        """The ways in which this run is stricter than a plain `docker run` are really there."""
        script = "import os; print(os.getpid(), os.getuid()); open('/opt/zerokit/x', 'w')"
        container = self.begin(["-c", script], entrypoint=["python"])
        code, said = container.wait(60), container.tail()
        if code == 0 or f"1 {STRANGER}" not in said or "Read-only file system" not in said:
            raise CheckFailed(f"expected process 1 of user {STRANGER} on a read-only root, found:\n{said}")
        return f"process 1, user id {STRANGER}, read-only root, no network"

    def modules(self) -> str:
        """What was cut away is not missed."""
        wanted = (
            "torch, torch.distributed.run, torch._dynamo, numpy.testing, scipy.stats, scipy.optimize, pandas, "
            "sklearn.linear_model, matplotlib.pyplot, altair, vl_convert, pyarrow.parquet, mlflow.server, sympy, "
            "networkx"
        )
        self.whole(["-c", f"import {wanted}"], entrypoint=["python"])
        return f"{len(wanted.split(', '))} modules are imported"

    def two_nodes(self) -> str:
        """A bench over two simulated nodes that saves a checkpoint and logs to MLflow."""
        asked = "bench --model gpt-tiny --seq-len 64 --nodes 2 --steps 5 --save run --output record.json"
        self.whole(asked.split())
        record = json.loads((self.volume / "record.json").read_text())
        if record["status"] != "ok":
            raise CheckFailed(f"the record says {record['status']}")
        if (found := self.mlflow_statuses()) != ["FINISHED"]:
            raise CheckFailed(f"MLflow says {found}")
        return "record ok, MLflow run FINISHED"

    def reshard(self) -> str:
        """The checkpoint cut for three ranks, proven, and equal to its source."""
        for asked in ("reshard run --to 3 --output run-3", "verify run-3", "diff run run-3"):
            self.whole(asked.split())
        return "two ranks to three, verified, no difference"

    def health(self) -> str:
        """The image's own health check."""
        test = self.image.config["Healthcheck"]["Test"]
        container = self.begin(test[2:], entrypoint=[test[1]])
        code = container.wait(120)
        if code != 0:
            raise CheckFailed(
                f"{' '.join(test[1:])}: exit code {code}\n{container.tail()}".replace("\n\n", "\n")
            )
        return " ".join(test[1:])

    def stopped_at_once(self) -> str:
        """SIGTERM during the imports, when zerokit has no handler yet."""
        asked = "bench --model gpt-5m --nodes 2 --steps 100000 --no-mlflow --no-twin"
        container = self.begin(asked.split())
        # The first process has made the second, a few hundredths of a second after Python has started.
        until(lambda: len(processes_of(STRANGER)) == 2, 20, "two processes")
        container.signal(signal.SIGTERM)
        started = time.monotonic()
        code = container.wait(60)
        taken = time.monotonic() - started
        if code != 128 + signal.SIGTERM or taken > 10:
            raise CheckFailed(f"exit code {code} after {taken:.1f} s, expected 143 within docker's 10 s")
        return f"exit code 143 after {taken:.1f} s"

    def stopped_in_the_middle(self) -> str:
        """SIGTERM while ranks train: they end, the record is kept and MLflow knows."""
        asked = "bench --model gpt-5m --nodes 2 --steps 100000 --no-twin --output killed.json"
        container = self.begin(asked.split())
        until(lambda: ranks_of(STRANGER) == 2, 120, "two ranks")
        until(lambda: "RUNNING" in self.mlflow_statuses(), 60, "a RUNNING run")
        time.sleep(8)  # into the steps
        if container.process is None or container.process.poll() is not None:
            raise CheckFailed(f"it ended by itself\n{container.tail()}")
        container.signal(signal.SIGTERM)
        started = time.monotonic()
        code = container.wait(60)
        taken = time.monotonic() - started
        status = json.loads((self.volume / "killed.json").read_text())["status"]
        found = (code, status, self.mlflow_statuses().count("KILLED"), ranks_of(STRANGER))
        if found != (143, "killed", 1, 0):
            raise CheckFailed(f"exit code, record, KILLED runs, ranks left: {found}\n{container.tail()}")
        return f"after {taken:.1f} s: ranks gone, record killed, MLflow run KILLED"

    def mlflow_statuses(self) -> list[str]:
        """Of the SQLite store that the image's user made in the volume."""
        store = self.volume / "mlflow.db"
        if not store.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            try:
                return [row[0] for row in database.execute("select status from runs order by start_time")]
            except sqlite3.OperationalError:  # the first process is still making its tables
                return []


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
    """The services of a compose file on one bridge, each with its own network namespace."""

    services: dict[str, dict[str, Any]]
    images: Mapping[str, Image]
    scratch: Path
    alive: dict[str, Container] = field(default_factory=dict)
    postgres: subprocess.Popen[bytes] | None = None
    namespaces: list[str] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, images: Mapping[str, Image], scratch: Path) -> Compose:
        """Parse the file as docker does: anchors, merges, and variables with defaults."""
        text = re.sub(
            r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1]) or found[2], file.read_text()
        )
        return cls(yaml.safe_load(text)["services"], images, scratch)

    @property
    def switch(self) -> str:
        """The namespace with the bridge: this machine's own network stays as it is."""
        return f"zkc{os.getpid()}-switch"

    def namespace(self, service: str) -> str:
        """Of one service."""
        return f"zkc{os.getpid()}-{service}"

    def address(self, service: str) -> str:
        """Of one service on the bridge."""
        return f"{SUBNET}.{10 + list(self.services).index(service)}"

    def connect(self) -> None:
        """Make the network and the file of host names."""
        self._namespace(self.switch)
        must(["ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge"])
        must(["ip", "-n", self.switch, "link", "set", "bridge", "up"])
        for number, service in enumerate(self.services):
            name = self.namespace(service)
            self._namespace(name)
            must(f"ip -n {self.switch} link add port{number} type veth peer name eth0 netns {name}".split())
            must(["ip", "-n", self.switch, "link", "set", f"port{number}", "master", "bridge", "up"])
            must(["ip", "-n", name, "address", "add", f"{self.address(service)}/24", "dev", "eth0"])
            must(["ip", "-n", name, "link", "set", "eth0", "up"])
        lines = ["127.0.0.1 localhost", *(f"{self.address(one)} {one}" for one in self.services)]
        (self.scratch / "hosts").write_text("\n".join(lines) + "\n")

    def _namespace(self, name: str) -> None:
        must(["ip", "netns", "add", name])
        self.namespaces.append(name)
        must(["ip", "-n", name, "link", "set", "lo", "up"])

    def start(self, service: str) -> str:
        """Start a service once those it depends on are as it wants them."""
        content = self.services[service]
        for other, condition in content.get("depends_on", {}).items():
            self._await(other, condition["condition"])
        if service == "postgres":
            self._start_postgres(content["environment"])
        else:
            self._start_container(service, content)
        return content["image"] if service != "postgres" else f"{content['image']}: Debian's in its place"

    def _start_container(self, service: str, content: Mapping[str, Any]) -> None:
        image = self.images[content["image"]]
        mounts = [tmpfs(*one.split(":")) for one in content.get("tmpfs", ())]
        for volume in content.get("volumes", ()):
            name, destination, *mode = volume.split(":")
            mounts.append(bind(self._volume(name, destination, image), destination, read_only=mode == ["ro"]))
        if not content.get("read_only"):
            mounts.append(tmpfs("/tmp"))
        entrypoint = content.get("entrypoint")
        container = Container(f"zerokit-check-{os.getpid()}-{service}", image, self.scratch)
        self.alive[service] = container
        container.start(
            content.get("command"),
            entrypoint=entrypoint,
            environment={name: str(value) for name, value in content.get("environment", {}).items()},
            mounts=mounts,
            network=self.namespace(service),
            shm=content.get("shm_size", "64m").removesuffix("b"),
            hosts=self.scratch / "hosts",
        )

    def _volume(self, name: str, destination: str, image: Image) -> Path:
        """A named volume: its first user's image gives it owner and mode, as docker does."""
        place = self.scratch / f"volume-{name}"
        if not place.exists():
            place.mkdir(mode=0o755)
            inside = image.root / destination.lstrip("/")
            if inside.exists():
                place.chmod(inside.stat().st_mode & 0o7777)
                os.chown(place, inside.stat().st_uid, inside.stat().st_gid)
        return place

    def _start_postgres(self, environment: Mapping[str, str]) -> None:
        programs = Path(must(["pg_config", "--bindir"]).strip())
        place = self.scratch / "volume-postgres"
        place.mkdir()
        password = self.scratch / "password"
        password.write_text(environment["POSTGRES_PASSWORD"])
        for path in (place, password):
            shutil.chown(path, "postgres", "postgres")
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        must(
            [
                *user,
                str(programs / "initdb"),
                f"--pgdata={place}",
                f"--username={environment['POSTGRES_USER']}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--no-sync",
            ]
        )
        with (place / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        serve = [str(programs / "postgres"), "-D", str(place), "-k", str(place), "-c", "listen_addresses=*"]
        with (self.scratch / "postgres.log").open("wb") as log:
            self.postgres = subprocess.Popen(
                self._inside("postgres", [*user, *serve]), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(lambda: self._sql("postgres", "select 1").returncode == 0, 60, "PostgreSQL")
        created = self._sql("postgres", f"create database {environment['POSTGRES_DB']}")
        if created.returncode != 0:
            raise CheckFailed(created.stderr)

    def _sql(self, database: str, text: str) -> subprocess.CompletedProcess[str]:
        environment = self.services["postgres"]["environment"]
        command = ["psql", "--host=127.0.0.1", f"--username={environment['POSTGRES_USER']}"]
        return run(
            self._inside("postgres", [*command, f"--dbname={database}", "--tuples-only", "--command", text]),
            timeout=20,
            environment={"PGPASSWORD": environment["POSTGRES_PASSWORD"]},
        )

    def _inside(self, service: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(service), *command]

    def _await(self, service: str, condition: str) -> None:
        container = self.alive.get(service)
        if condition == "service_completed_successfully":
            if container is None:
                raise CheckFailed(f"{service} was not started")
            code = container.wait(400)
            if code != 0:
                raise CheckFailed(f"{service} ended with {code}\n{container.tail()}")
        elif condition == "service_healthy":
            until(lambda: self.healthy(service), 120, f"a healthy {service}")
        else:
            raise CheckFailed(f"{service}: what is {condition}?")

    def healthy(self, service: str) -> bool:
        """The service's own health check of the compose file."""
        test = self.services[service]["healthcheck"]["test"]
        command = ["sh", "-c", test[1]] if test[0] == "CMD-SHELL" else test[1:]
        if service == "postgres":
            # Where the official image has its socket; here another PostgreSQL may have one.
            where = {"PGHOST": "127.0.0.1"}
            return run(self._inside(service, command), environment=where, timeout=60).returncode == 0
        container = self.alive.get(service)
        if container is None or container.process is None or container.process.poll() is not None:
            raise CheckFailed(f"{service} is not running\n{container.tail() if container else ''}")
        return container.execute(command).returncode == 0

    def trained(self) -> str:
        """Both nodes ended well, and their record is one of two ranks on two nodes."""
        for service in ("node-0", "node-1"):
            self._await(service, "service_completed_successfully")
        records = sorted((self.scratch / "volume-runs/two-nodes").glob("*.json"))
        if len(records) != 1:
            raise CheckFailed(f"{len(records)} records, expected one")
        record = json.loads(records[0].read_text())
        settings = record["settings"]
        found = (record["status"], settings["nodes"], settings["stage"])
        if found != ("ok", 2, 2):
            raise CheckFailed(f"status, nodes, stage: {found}")
        return "one record of two nodes"

    def tracked(self) -> str:
        """The run lies in PostgreSQL."""
        database = self.services["postgres"]["environment"]["POSTGRES_DB"]
        told = self._sql(database, "select status from runs")
        if told.stdout.split() != ["FINISHED"]:
            raise CheckFailed(f"PostgreSQL holds runs {told.stdout.split()}\n{told.stderr}")
        return "one run, FINISHED, in PostgreSQL"

    def shown(self) -> str:
        """The page is served to other hosts, and says what was compared."""
        self._await("compare", "service_completed_successfully")
        until(lambda: self.healthy("page"), 60, "a healthy page")
        script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        url = f"http://{self.address('page')}:8000/"
        page = must(self._inside("mlflow", [sys.executable, "-c", script, url]))
        if "gpt-5m" not in page or "<svg" not in page:
            raise CheckFailed("the page does not show the model that was trained")
        return f"{len(page) / 1e3:.0f} kB from another host"

    def end(self) -> None:
        """Stop all, and take the network away."""
        for container in self.alive.values():
            container.end()
        if self.postgres is not None:
            self.postgres.send_signal(signal.SIGINT)  # its fast shutdown
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.postgres.wait(timeout=20)
            self.postgres.kill()
        for name in self.namespaces:
            run(["ip", "netns", "delete", name])


def check_image(table: Table, image: Image, scratch: Path) -> None:
    """Everything about one container."""
    volume = scratch / "volume-of-one"
    volume.mkdir()
    volume.chmod((image.root / "runs").stat().st_mode & 0o7777)
    runs = Runs(image, scratch, volume)
    try:
        table.check("image: confined", runs.is_confined)
        table.check("image: modules", runs.modules)
        if table.check("image: bench on two nodes", runs.two_nodes):
            table.check("image: reshard", runs.reshard)
        table.check("image: health check", runs.health)
        table.check("image: SIGTERM at the start", runs.stopped_at_once)
        table.check("image: SIGTERM in a bench", runs.stopped_in_the_middle)
    finally:
        for container in runs.alive:
            container.end()


def check_compose(table: Table, images: Mapping[str, Image], scratch: Path) -> None:
    """Everything about the compose file."""
    compose = Compose.read(ROOT / "docker/compose.yaml", images, scratch)
    try:
        compose.connect()
        for service in ("postgres", "mlflow", "node-0", "node-1"):
            if not table.check(f"compose: {service} starts", partial(compose.start, service)):
                return
        if not table.check("compose: the nodes train", compose.trained):
            return
        table.check("compose: MLflow", compose.tracked)
        for service in ("compare", "page"):
            if not table.check(f"compose: {service} starts", partial(compose.start, service)):
                return
        table.check("compose: the page", compose.shown)
    finally:
        compose.end()


def missing_tools() -> list[str]:
    """Debian packages that have to be installed first."""
    return [package for tool, package in TOOLS.items() if shutil.which(tool) is None]


@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """The place of images and a scratch folder; the latter always goes, the former unless it is kept."""
    with tempfile.TemporaryDirectory(prefix="zerokit-image-check-", dir="/var/tmp") as scratch:
        # For ranks of any user id on the way to their volumes.
        os.chmod(scratch, 0o711)
        place = keep or Path(scratch) / "images"
        place.mkdir(parents=True, exist_ok=True)
        yield place, Path(scratch)


def main() -> int:
    """Run all checks; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/image-check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep base and layers there, for a faster next time"
    )
    parser.add_argument("--install", action="store_true", help="install missing Debian packages with apt-get")
    parser.add_argument(
        "--mirror", metavar="URL", help="of Debian; default: the first that apt-get uses here"
    )
    parser.add_argument(
        "--torch-index",
        metavar="URL",
        help="where torch's wheels are; default: the Dockerfile's, or pip's own places where pip is configured here",
    )
    parser.add_argument(
        "--driver", default="overlay", help="buildah's storage: overlay, or vfs where that is forbidden"
    )
    parser.add_argument(
        "--only", choices=("image", "compose"), help="run only these checks of the built image"
    )
    asked = parser.parse_args()
    if os.geteuid() != 0 or sys.platform != "linux":
        print("image-check: needs root on Linux, for namespaces and mounts", file=sys.stderr)
        return CANNOT_RUN
    if asked.install and (missing := missing_tools()):
        packages = " ".join(missing).split()
        must(["apt-get", "update"])
        must(["apt-get", "install", "--yes", "--no-install-recommends", *packages], timeout=1800)
    if missing := missing_tools():
        print(
            f"image-check: first run apt-get install {' '.join(missing)}, or give --install", file=sys.stderr
        )
        return CANNOT_RUN
    # So that whatever ends this cleans up on the way.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    table = Table()
    with workplace(asked.keep) as (place, scratch):
        store = Store(place.resolve(), asked.driver)
        mounted: list[Image] = []
        try:
            _all(table, store, scratch, asked, mounted)
        finally:
            for image in mounted:
                run(store.command("rm", image.container))
            run(["umount", "-R", str(store.place / "storage" / store.driver)])
    print(plain_table("image-check", ("check", "result", "seconds", "found"), table.rows))
    print("\nNot tried here:", *NOT_TRIED, sep="\n- ")
    return 1 if table.failed else 0


def _all(table: Table, store: Store, scratch: Path, asked: argparse.Namespace, mounted: list[Image]) -> None:
    options, configured = pip_settings(scratch)
    index = asked.torch_index if asked.torch_index is not None else ("" if configured else None)
    steps: list[tuple[str, Callable[[], str]]] = [
        ("base", lambda: build_base(store, asked.mirror)),
        ("build: image", lambda: build(store, "zerokit", IMAGE, options, index)),
        ("build: tracking server", lambda: build(store, "tracking-server", SERVER, options, index)),
    ]
    if not all(table.check(name, work) for name, work in steps):
        return
    table.check("size: image", lambda: size_of_image(store))
    table.check("size: zerokit's layer", lambda: size_of_own_layer(store))
    images = {"zerokit": Image.mount(store, IMAGE), "zerokit-tracking-server": Image.mount(store, SERVER)}
    mounted.extend(images.values())
    if asked.only != "compose":
        check_image(table, images["zerokit"], scratch)
    if asked.only != "image":
        check_compose(table, images, scratch)


if __name__ == "__main__":
    sys.exit(main())
