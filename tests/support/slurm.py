"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd over loopback."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerokit.network import free_port

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")


def refusal() -> str | None:
    """Why there can be no cluster here; None where there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (packages slurm-wlm, munge)" if missing else None


@dataclass
class Cluster:
    """Nodes n1 and n2; `environment` leads Slurm's commands to it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command with this cluster's configuration."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def _configuration(folder: Path, gpus: int) -> str:
    host = socket.gethostname().partition(".")[0]
    # GPUs are a number that Slurm counts, and so are the cores of their ranks: there is none of them to be bound to.
    cores, has = (gpus, f" Gres=gpu:{gpus}") if gpus else (len(os.sched_getaffinity(0)), "")
    counted = "GresTypes=gpu\nSlurmdParameters=config_overrides\n" if gpus else ""
    return f"""ClusterName=zerokit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{"none" if gpus else "affinity"}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1
KillWait=10
{counted}NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cores}{has} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cores}{has} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


@contextlib.contextmanager
def cluster(gpus: int = 0) -> Iterator[Cluster]:
    """Make it, and take everything down at the end; Slurm believes that each node has so many `gpus`."""
    # Jobs of two clusters have the same numbers, from which ranks take their port.
    alone = (Path(tempfile.gettempdir()) / "zerokit-slurm.lock").open("w")
    fcntl.flock(alone, fcntl.LOCK_EX)
    folder = Path(tempfile.mkdtemp(prefix="zerokit-slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_configuration(folder, gpus))
    for number in range(gpus):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    made = Cluster(folder, environment)
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid"]
    munged += [f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"]
    commands = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}-out.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
            if command is munged:
                _await((folder / "munge.socket").exists, made)
        idle = ["sinfo", "--noheader", "--format=%T %D"]
        _await(lambda: made.run(*idle).stdout.strip() == "idle 2", made)
        yield made
    finally:
        made.run("scancel", "--full", "--user=root")
        for daemon in reversed(daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        alone.close()
        shutil.rmtree(folder, ignore_errors=True)


def _await(condition: Callable[[], bool], made: Cluster) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cluster does not come up: {made.run('sinfo').stdout}\n{made.logs()}")
        time.sleep(0.2)
