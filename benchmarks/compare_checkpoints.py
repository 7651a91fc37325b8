"""Checkpoints: zerokit's commands and calls beside `cp` and `sync` and torch's own tools, on this machine.

    python benchmarks/compare_checkpoints.py
    python benchmarks/compare_checkpoints.py --size-gb 0.5 --repeats 3 --skip-live --json results.json
    python benchmarks/compare_checkpoints.py --deepspeed CKPT   # made by benchmarks/deepspeed_checkpoint.py

Commands are whole processes, with their processor time and peak resident memory; everything is in the page cache, and
every figure includes the way to the disk. Rounds over all follow each other, every second one in reverse order, so that
a machine's moods fall on all alike: trust the ratios of medians.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import ROOT, in_rounds, plain_table, read_options, remove, spread, write_json
from benchmarks.ranks import run_ranks
from benchmarks.synthetic import make_checkpoint
from zerokit.bench.machine.host import cores

WHOLE, WEIGHTS, HALF = (f"cp + sync ({what})" for what in ("checkpoint", "weights", "bf16 weights"))
READ_AND_HALF = "read masters, cp + sync (bf16 weights)"
"""The floors."""

Words = Sequence[str | Path]
_ZEROKIT = (sys.executable, "-m", "zerokit")
_COPY = ("sh", "-c", 'cp -r "$0" "$1" && sync')
_DCP_TO_TORCH = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert;"
    "convert(*sys.argv[1:]); import os; os.sync()"
)


@dataclass(frozen=True, slots=True)
class Task:
    """A command to time, which ends with its output; `floor` is the one that it is compared with."""

    name: str
    command: Words
    floor: str = ""


Figures = dict[str, list[float]]
"""Values by run: "seconds"; for commands also "processor_s" and the "peak_bytes" of the largest process."""


# A process of its own: a child's peak memory begins with that of the process that it was forked from.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
processor = usage.ru_utime + usage.ru_stime
code = os.waitstatus_to_exitcode(status)
print(json.dumps([code, time.perf_counter() - started, processor, usage.ru_maxrss * 1024]))
"""


def run(command: Words) -> tuple[float, float, int]:
    """Seconds, processor seconds and peak bytes of a command and its children. Raises `RuntimeError` if it fails."""
    os.sync()
    done = subprocess.run(
        [sys.executable, "-S", "-c", _LAUNCHER, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        text=True,
    )
    code, *figures = json.loads(done.stdout.splitlines()[-1])
    if code:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return figures[0], figures[1], figures[2]


def run_tasks(tasks: Sequence[Task], repeats: int) -> dict[str, Figures]:
    """All tasks `repeats` times, after one round that only fills the page cache."""
    commands = {task.name: task.command for task in tasks}

    def once(name: str) -> tuple[float, float, int]:
        figures = run(commands[name])
        remove(Path(commands[name][-1]))
        return figures

    names = "seconds", "processor_s", "peak_bytes"
    rounds = in_rounds(list(commands), repeats + 1, once)
    return {
        task: dict(zip(names, map(list, zip(*runs[1:], strict=True)), strict=True))
        for task, runs in rounds.items()
    }


def offline_tasks(directory: Path, step: Path, world: int) -> list[Task]:
    """`reshard` and `consolidate` beside copies of as many bytes."""
    out, weights, half = directory / "out", directory / "weights", directory / "weights-bf16"
    consolidate: Words = [*_ZEROKIT, "consolidate", step]
    in_half = ["--dtype", "bf16"]
    run([*consolidate, "-o", weights])
    run([*consolidate, *in_half, "-o", half])
    return [
        Task(WHOLE, [*_COPY, step, out]),
        _reshard(step, world, out, WHOLE),
        Task(WEIGHTS, [*_COPY, weights, out]),
        Task("zerokit consolidate", [*consolidate, "-o", out], WEIGHTS),
        Task(HALF, [*_COPY, half, out]),
        Task("zerokit consolidate, bf16", [*consolidate, *in_half, "-o", out], HALF),
    ]


def _reshard(step: Path, world: int, out: Path, floor: str = "") -> Task:
    return Task(
        f"zerokit reshard --to {world}", [*_ZEROKIT, "reshard", step, "--to", str(world), "-o", out], floor
    )


def peer_tasks(directory: Path) -> list[Task]:
    """torch's tools, on what `measure` has left: a state of the same size, and its weights."""
    python, out = [sys.executable, "-c"], directory / "out"
    whole = (
        "import sys, os, glob; os.makedirs(sys.argv[2]); from safetensors import safe_open;"
        "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as c;"
        "names = [n for f in glob.glob(sys.argv[1] + '/*.safetensors') for n in safe_open(f, 'pt').keys()];"
        "c(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1), num_threads=2); os.sync()"
    )
    return [
        Task("torch dcp_to_torch_save (checkpoint)", [*python, _DCP_TO_TORCH, directory / "dcp", out], WHOLE),
        Task("torch consolidate_safetensors (weights)", [*python, whole, directory / "dcp-hf", out], WEIGHTS),
    ]


def foreign_tasks(directory: Path, checkpoint: Path, world: int) -> list[Task]:
    """Conversions of a DeepSpeed checkpoint, and of the same as DCP, beside the frameworks' own tools."""
    out, dcp, half = directory / "out", directory / "dcp", directory / "weights-bf16"
    convert: Words = [*_ZEROKIT, "convert", checkpoint]
    consolidate: Words = [*_ZEROKIT, "consolidate", checkpoint, "--dtype", "bf16", "-o"]
    to_dcp = ["--format", "dcp"]
    run([*convert, dcp, *to_dcp])
    run([*consolidate, half])
    # What any conversion to bf16 must do: read the masters' files, write the result.
    read_and_write = ["sh", "-c", 'cat "$0"/*/*optim_states.pt > /dev/null && cp -r "$1" "$2" && sync']
    peers, whole_dcp = ROOT / ".peers/bin/python", "cp + sync (DCP checkpoint)"
    tasks = [
        Task(WHOLE, [*_COPY, checkpoint, out]),
        Task(f"zerokit convert --to {world}", [*convert, "--to", str(world), out], WHOLE),
        _reshard(checkpoint, world, out, WHOLE),
        Task("zerokit convert --format dcp", [*convert, *to_dcp, out], WHOLE),
        Task(READ_AND_HALF, [*read_and_write, checkpoint, half, out]),
        Task("zerokit consolidate, bf16", [*consolidate, out], READ_AND_HALF),
        Task(whole_dcp, [*_COPY, dcp, out]),
        Task("zerokit convert, of DCP", [*_ZEROKIT, "convert", dcp, out], whole_dcp),
        Task("torch dcp_to_torch_save", [sys.executable, "-c", _DCP_TO_TORCH, dcp, out], whole_dcp),
    ]
    if peers.exists():
        script = checkpoint / "zero_to_fp32.py"
        tasks.append(Task("DeepSpeed zero_to_fp32 (parameters)", [peers, script, checkpoint, out], WHOLE))
    return tasks


def live(directory: Path, size_gb: float, repeats: int) -> dict[str, Figures]:
    """Times of save and load calls."""
    from benchmarks.checkpoint_calls import measure  # and torch: only here

    print(f"save and load, {repeats} rounds", file=sys.stderr, flush=True)
    (seconds,) = run_ranks(measure, str(directory), 1000 * size_gb, repeats, world=1, threads=cores())
    return {name: {"seconds": times} for name, times in seconds.items()}


def show(figures: Mapping[str, Figures], floors: Mapping[str, str], title: str) -> None:
    """Print the table."""
    rows = []
    for name, found in figures.items():
        floor = figures.get(floors.get(name, ""))
        beside = f"{median(found['seconds']) / median(floor['seconds']):.2f}" if floor else ""
        processor = f"{median(found['processor_s']):.2f}" if "processor_s" in found else ""
        peak = f"{max(found['peak_bytes']) / 2**20:.0f}" if "peak_bytes" in found else ""
        rows.append([name, spread(found["seconds"], 2), beside, processor, peak])
    columns = ["", "seconds (min–max)", "÷ floor", "processor s", "peak RSS MiB"]
    print(plain_table(title, columns, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    options = read_options(
        __doc__,
        arguments,
        size_gb=(2.0, "of the checkpoint, in 10^9 bytes"),
        repeats=(5, "rounds over all"),
        world=(4, "ranks of the checkpoint"),
        to=(8, "ranks that it is resharded to"),
        deepspeed=(Path, "only conversions of this checkpoint of DeepSpeed's"),
        directory=(Path, "where to work  [default: a temporary one]"),
        skip_live=(False, "neither torch nor save and load"),
        json=(Path, "write settings, machine and every figure here"),
    )
    with tempfile.TemporaryDirectory(prefix="zerokit-", dir=options.directory) as folder:
        directory = Path(folder)
        step = directory / "synthetic" / "step-00000001"
        calls: dict[str, Figures] = {}
        if options.deepspeed:
            size = sum(file.stat().st_size for file in options.deepspeed.rglob("*") if file.is_file()) / 1e9
            tasks = foreign_tasks(directory, options.deepspeed, options.to)
            title = f"{options.deepspeed}, {size:.1f} GB"
        else:
            title = f"{options.size_gb:g} GB, {options.world} ranks"
            make_checkpoint(step, options.size_gb, options.world)
            tasks = offline_tasks(directory, step, options.to)
            if not options.skip_live:
                calls = live(directory, options.size_gb, options.repeats)
                tasks += peer_tasks(directory)
        figures = run_tasks(tasks, options.repeats) | calls
    floors = {task.name: task.floor for task in tasks} | dict.fromkeys(calls, "write and sync")
    floors["zerokit.load"] = "dcp.load"
    record = {
        "format": "zerokit.compare-checkpoints/1",
        "settings": {key: str(value) for key, value in vars(options).items()},
        "figures": figures,
        "floors": floors,
    }
    write_json(options.json, record)
    show(figures, floors, f"{title}, median of {options.repeats}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
