"""`zerokit launch`: starts a program of the user's as `zerokit bench` starts its ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from zerokit.cli.bench_options import setting_option
from zerokit.cli.launcher_options import launcher_options, take_options
from zerokit.cli.launchers import choose_launcher, is_given
from zerokit.cli.work import PATH

if TYPE_CHECKING:
    from zerokit.cluster.membership import Membership

_GRACE_SECONDS = 30.0
"""In which a program that was told to end may save; torchrun gives it as long."""
_EPILOG = """\b
  zerokit launch --nodes 2 -- train.py --epochs 3
  zerokit launch --launcher ssh --hosts node-0,node-1 -- train.py
  zerokit launch --launcher slurm --nodes 2 --gpus-per-node 8 -- train.py
  srun --ntasks-per-node 8 zerokit launch -- train.py
\b
Exit codes: 0 ok, 1 a rank failed, 2 wrong use, 128 + N ended by signal N.
"""


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("program", metavar="[--] PROGRAM [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@setting_option("nodes", several=False)
@setting_option(
    "nproc_per_node",
    default="its visible CUDA devices, divided equally among simulated nodes; without devices 1",
    several=False,
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--log-dir",
    type=PATH,
    metavar="DIR",
    help="An empty or new folder for the ranks' output.  [default: a temporary one, kept if a rank fails]",
)
@launcher_options
@click.pass_context
def command(
    context: click.Context,
    /,
    program: tuple[str, ...],
    nodes: int | None,
    nproc_per_node: int | None,
    module: bool,
    log_dir: Path | None,
    **options: Any,
) -> None:
    """Start a program of your own on all ranks, in torchrun's environment.

    PROGRAM is a script, or with -m a module; ARGS are its own. The ranks' output is shown line by line, each behind its
    rank. Slurm outside an allocation gets a job; for Kubernetes the objects are printed, or submitted with --submit.
    Processes that srun, mpirun or torchrun has started become the program's ranks.
    """
    from zerokit.bench.machine.host import visible_devices

    words = [*(["-m"] if module else []), *program]
    if words == ["-m"]:
        raise click.UsageError("-m needs a module")
    if words[0] != "-m" and words[0].startswith("-"):
        raise click.UsageError(f"{words[0]} is an option of Python: name a script, or a module with -m")
    chosen = choose_launcher(take_options(options), os.environ)
    if is_given(context, "log_dir") and (chosen.submits or chosen.member is not None):
        raise click.UsageError(f"--log-dir is for ranks started from here, not for --launcher {chosen.name}")
    nodes, devices = nodes or chosen.nodes or 1, visible_devices()
    devices_of_node = len(devices) // (nodes if chosen.here else 1)
    if chosen.submits:
        from zerokit.cli.submission import submit_program

        ranks = nproc_per_node or chosen.options["gpus_per_node"] or devices_of_node or 1
        context.exit(submit_program(context, chosen, words, nodes=nodes, ranks=ranks))
    ranks = nproc_per_node or chosen.nproc_per_node or devices_of_node or 1
    chosen.require_world(nodes, ranks)
    if chosen.member is not None:
        _become_rank(chosen.member, ranks, words)
    if chosen.name == "local":
        if words[0] != "-m" and not Path(words[0]).exists():
            raise click.UsageError(f"the program {words[0]} does not exist")
        if devices and nodes > 1:  # each simulated node gets its own of these
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(one.uuid for one in devices))
    from zerokit.interrupts import Interrupts
    from zerokit.launch.rank import PROGRAM

    followed = replace(chosen, options={**chosen.options, "follow": True})
    with Interrupts() as interrupts, _logs(log_dir) as folder:
        followed.launch(interrupts, None)(
            *(PROGRAM, words),
            nodes=nodes,
            nproc_per_node=ranks,
            log_dir=folder,
            poll=lambda: None,
            to_stderr=False,
            grace=_GRACE_SECONDS,
        )


@contextmanager
def _logs(asked: Path | None) -> Iterator[Path]:
    """The folder of the ranks' logs; a temporary one is removed, unless a rank fails: the error then names it."""
    from zerokit.launch.failures import WorkerFailed

    if asked is not None:
        try:
            asked.mkdir(parents=True, exist_ok=True)
            used = any(asked.iterdir())
        except OSError as error:
            raise click.UsageError(f"--log-dir {asked} is no folder to write to: {error.strerror}") from error
        if used:
            raise click.UsageError(f"--log-dir {asked} is not empty: name a new folder")
        yield asked
        return
    folder = Path(tempfile.mkdtemp(prefix="zerokit-launch-"))
    with ExitStack() as removing:
        removing.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except WorkerFailed:
            removing.pop_all()
            raise


def _become_rank(member: Membership, ranks: int, words: Sequence[str]) -> NoReturn:
    """Become Python with the program, in torchrun's environment."""
    from zerokit.launch.rank import become_program
    from zerokit.launch.ranks import cores

    # Where srun has bound each rank to cores of its own, it says how many; else those of a node are shared.
    threads = int(os.environ.get("SLURM_CPUS_PER_TASK") or max(1, len(cores()) // ranks))
    variables = {
        "RANK": member.index,
        "WORLD_SIZE": member.count,
        "LOCAL_RANK": member.index % ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": member.node_of(member.index),
        "MASTER_ADDR": member.master_addr,
        "MASTER_PORT": member.master_port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or min(threads, len(cores())),
    }
    become_program(words, os.environ | {name: str(value) for name, value in variables.items()})
