"""Ranks on this machine: a process each, in torchrun's environment. All end when one fails, or with their starter."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zerokit
from zerokit.documents import parse_json, read_text
from zerokit.launch import agents
from zerokit.launch.failures import Failure, LaunchError, last_error, says_peer_lost
from zerokit.launch.processes import MARK, StoppedProcesses, kill_marked
from zerokit.network import address_towards, interface_of
from zerokit.patience import Patience

_AROUND = ("TORCHELASTIC_", "PET_")
"""Variables of a launch around this one."""


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a launch.

    Attributes:
        nodes: how many there are.
        nproc_per_node: ranks of each.
        address: where all ranks meet rank 0.
        port: of this address.
        environment: variables beside those of the process that starts a rank.
        threads: of each rank, where OMP_NUM_THREADS is not set; by default the cores of its starter are shared.
    """

    nodes: int
    nproc_per_node: int
    address: str
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


class Ranks:
    """An `Agent` on this machine. Rank R's output is in `rank-R` of the folder of logs."""

    mute = False
    note: str | None = None

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        command: Sequence[str],
        log_dir: Path,
        began: Callable[[int, int], None] = lambda rank, pid: None,
    ) -> None:
        """Start these ranks; `command` is the module that each runs, and its arguments.

        `began` is called with each rank and its process.
        """
        self.failures: list[Failure] = []
        self.trouble: str | None = None
        self._each, self._logs = world.nproc_per_node, log_dir
        self._launch_id = uuid.uuid4().hex
        self._stopped = StoppedProcesses()
        self._ended: dict[int, float] = {}
        self._patience: Patience | None = None
        self._code: int | None = None
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_AROUND)}
        variables |= world.environment
        # An empty variable is one that is not set; torch would read a number from it.
        variables["OMP_NUM_THREADS"] = variables.get("OMP_NUM_THREADS") or str(
            world.threads or threads_per_rank(len(ranks))
        )
        with contextlib.suppress(OSError):
            # gloo otherwise looks the host's own name up, which on many machines leads to loopback or nowhere.
            if (interface := interface_of(address_towards(world.address))) is not None:
                variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables |= {
            MARK: self._launch_id,
            "ZEROKIT_STARTER": str(os.getpid()),
            "WORLD_SIZE": str(world.nodes * world.nproc_per_node),
            "LOCAL_WORLD_SIZE": str(world.nproc_per_node),
            "MASTER_ADDR": world.address,
            "MASTER_PORT": str(world.port),
        }
        self._processes = {}
        for rank in ranks:
            node, local_rank = divmod(rank, self._each)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
            try:
                (folder := log_dir / f"rank-{rank}").mkdir()
                self._processes[rank] = start_rank(command, variables | own, folder)
                began(rank, self._processes[rank].pid)
            except OSError as error:  # no process is left: ulimit -u, or a container's limit
                self.end()
                raise LaunchError(f"rank {rank} cannot be started: {error.strerror}") from error

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        self._stopped.look(self._processes[rank].pid for rank, code in codes.items() if code is None)
        for rank, code in codes.items():
            if code is not None:
                self._ended.setdefault(rank, time.time())
        if self._patience is None and any(codes.values()):
            self._patience = Patience(agents.PEERS_FOLLOW_SECONDS)
        late = self._patience is not None and self._patience.over
        if late or None not in codes.values():
            self._code = int(any(codes.values()))
            # Those that are killed next are no failures.
            self.failures = [self._failure(rank, code) for rank, code in codes.items() if code]
            self.end()
        return self._code

    def _failure(self, rank: int, code: int) -> Failure:
        pid, folder = self._processes[rank].pid, self._logs / f"rank-{rank}"
        message = self._stopped.explain(pid) or (last_error(folder / "stderr.log") if code > 0 else "")
        found = Failure(rank, rank // self._each, pid, code, message, False, self._ended[rank])
        found = replace(found, follows=says_peer_lost(message))
        with contextlib.suppress(OSError, ValueError, TypeError):
            said = parse_json(read_text(folder / "error.json"))
            found = replace(found, **said)
        return found

    def send_signal(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def end(self) -> None:
        """Kill what is left of them, and of what they have started."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        kill_marked(self._launch_id)


def start_rank(command: Sequence[str], variables: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start one rank, whose output goes to this folder.

    Python looks for modules in no working directory (`-P`): a file `secrets.py` there would be run in place of its own.
    """
    root = str(Path(zerokit.__file__).parents[1])
    if sys.path[0] == root:  # `python -m zerokit` in a clone: ranks run the same files
        path = variables.get("PYTHONPATH")
        variables = {**variables, "PYTHONPATH": root if path is None else f"{root}{os.pathsep}{path}"}
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "zerokit.launch.rank", *command],
            env={**variables, "ZEROKIT_ERROR_FILE": str(folder / "error.json")},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we pass it on
        )


def cores() -> list[int]:
    """The cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def threads_per_rank(ranks: int) -> int:
    """The cores that this process may use, divided among ranks; at least one each."""
    return max(1, len(cores()) // ranks)


def describe_machine() -> dict[str, Any]:
    """This machine's `host` name, and the `cores` that this process may use."""
    return {"host": socket.gethostname(), "cores": cores()}
