"""A training that is killed again and again (see scripts/crash-rounds).

Each round forks the ranks from a process that has imported torch. They resume from the newest step, train, and save
each step, in the foreground or beside the training, with retention, until one of them or all are killed. What they
train is a function of the step alone, so that whatever is resumed from can be compared with what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - a process's first optimizer imports it
import torch.distributed as dist  # noqa: E402
from crash_commands import play_conversions, play_elastic, play_pushes, play_sweeps  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

import zerokit  # noqa: E402
from zerokit import files  # noqa: E402
from zerokit.checkpoint.bases import unreferenced  # noqa: E402
from zerokit.checkpoint.run import island_runs, list_steps  # noqa: E402
from zerokit.checkpoint.staging import leftovers  # noqa: E402
from zerokit.placement import stage_of  # noqa: E402
from zerokit.process import Process  # noqa: E402

TIMEOUT_S = 10.0
"""Time-out of collectives; a closed connection is noticed at once."""
PATIENCE_S = 60.0
"""Ranks that say nothing for so long hang."""
KINDS = ("saves", "background", "frozen", "tensorwise", "islands", "elastic", "sweeps", "push", "conversions")
KEPT = 2
SAVES = 4
"""At most so many are begun before the kill."""


@dataclass
class Report:
    """What the rounds found; the five numbers of `faults` must be zero."""

    rounds: int = 0
    seed: int = 0
    ranks: int = 0
    kills_of_one: int = 0
    kills_of_all: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    """How many kills of benches and pushes fell into which phase."""
    saves: int = 0
    """That returned."""
    resumes: int = 0
    lost_steps: int = 0
    """Committed, and not there (nor a later one) after a kill."""
    blocked_resumes: int = 0
    damaged_steps: int = 0
    """The newest one does not verify, or is not what was saved."""
    left_behind: int = 0
    """Directories and files that killed writers left, and the next save did not remove."""
    unclear_ends: int = 0
    """Survivors that hung, or raised what is no error of zerokit's."""
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return (
            self.lost_steps + self.blocked_resumes + self.damaged_steps + self.left_behind + self.unclear_ends
        )


@dataclass(frozen=True)
class Round:
    """What a round does, drawn once for all its ranks."""

    number: int
    seed: int
    world: int
    stage: int
    exchanges: bool
    background: bool
    """Every save is beside the training."""
    frozen: bool
    """A frozen base, which changes now and then, is saved once for all steps that have the same."""
    tensorwise: bool
    """The matrix is updated whole, and has states in files of their own."""
    islands: bool
    """Every rank is an island of local steps, with a run of its own."""
    last: bool
    """Nobody is killed: it resumes, saves once and ends."""


class WithoutExchange(files.System):
    """A file system on which two directories cannot change places."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


# --- a rank ------------------------------------------------------------------------------------------------


def train(optimizer: zerokit.ZeroOptimizer, step: int) -> None:
    """One step, the same on every rank and at every world size: multiples of powers of two, so that sums are exact."""
    model = optimizer.runtime.model
    optimizer.backward(model(torch.full((1, 8), float(step % 4))).sum())
    optimizer.step()
    optimizer.zero_grad()
    if isinstance(base := getattr(model, "base", None), torch.nn.Parameter):
        with optimizer.gathered(), torch.no_grad():
            base.fill_(step // 4 if step else -1)


def digest(optimizer: zerokit.ZeroOptimizer) -> str:
    """A digest of the whole weights. Collective."""
    state = optimizer.runtime.model.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()[:16]


def litter(run: Path) -> list[str]:
    """What is in the run and is no step, but for what living processes are about."""
    found = []
    for one in island_runs(run) or [run]:
        unnamed = {base.name for base in unreferenced(one)}
        unfinished = [left for left in leftovers(one) if not left.gone and left.writer != Process.current()]
        living = {"latest", *(left.path.name for left in unfinished)}
        found += [
            path.name
            for path in one.iterdir()
            if (not path.name.startswith(("step-", "frozen-")) and path.name not in living)
            or path.name in unnamed
        ]
    return found


def rank_main(this: Round, rank: int, run: Path, store: Path, pipe: int) -> None:
    """Resume, then train and save until killed."""

    def say(*words: object) -> None:
        os.write(pipe, f"{' '.join(map(str, words))}\n".encode())

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(store), this.world),
        rank=rank,
        world_size=this.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    say("joined", rank)
    model = torch.nn.Linear(8, 24)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    if this.frozen:
        model.base = torch.nn.Parameter(torch.zeros(200, 300), requires_grad=False)
    classes: Any = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)
    if this.tensorwise:
        classes = {torch.optim.Adafactor: [model.weight], classes: [model.bias]}
    optimizer = zerokit.ZeroOptimizer(
        model,
        classes,
        stage=("local", stage_of(this.stage)) if this.islands else stage_of(this.stage),
        mesh=(this.world, 1) if this.islands else None,
        precision="fp32",
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if this.islands:
        zerokit.LocalSteps(optimizer, every=2, outer=None)
        # A save that returns is to be on all islands.
        warnings.filterwarnings("error", "other islands may lack it|older steps stay", zerokit.ZerokitWarning)
    step = 0
    if list_steps(run):
        step = zerokit.load(run, optimizer)["step"]
        found = digest(optimizer)
        if rank == 0:
            say("resumed", step, found)
    draw = random.Random(f"{this.seed} {this.number}")
    with files.replaced(files.System() if this.exchanges else WithoutExchange()):
        for number in range(10_000):
            step += 1
            train(optimizer, step)
            found = digest(optimizer)
            blocking, again = draw.random() < 0.5 and not this.background, draw.random() < 0.2
            if rank == 0:
                say("begins", step, found)
            for overwrite in (False, True)[: 1 + again]:
                options: dict[str, Any] = {
                    "step": step,
                    "extra": {"step": step},
                    "overwrite": overwrite,
                    "keep_last": KEPT,
                    "frozen": "once" if this.frozen else "always",
                }
                if blocking:
                    zerokit.save(run, optimizer, **options)
                else:
                    saving = zerokit.save(run, optimizer, blocking=False, **options)
                    train(optimizer, 0)  # of another line: what is saved must not see it
                    saving.wait()
                    zerokit.load(run, optimizer)
                if rank == 0:
                    say("saved", step)
                    if number == 0 and (left := litter(run)):
                        say("left", *left)
            if this.last:
                break
    dist.barrier()
    dist.destroy_process_group()


def fork_rank(this: Round, rank: int, run: Path, store: Path, pipe: int) -> int:
    """The process's number."""
    child = os.fork()
    if child:
        return child
    code = 1
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # connections to the dead, steps that `latest` does not name yet
    try:
        rank_main(this, rank, run, store, pipe)
        code = 0
    except zerokit.ZerokitError as error:
        os.write(
            pipe, f"error {rank} {type(error).__name__}: {error}".replace("\n", " ")[:2000].encode() + b"\n"
        )
    except BaseException:
        os.write(pipe, f"strange {rank} {traceback.format_exc()!r}"[:3000].encode() + b"\n")
    finally:
        os._exit(code)


# --- the rounds --------------------------------------------------------------------------------------------


class Rounds:
    """The process that forks and kills."""

    def __init__(self, run: Path, stores: Path, report: Report) -> None:
        self._run, self._stores, self._report = run, stores, report
        self._committed = 0
        self._digests: dict[int, str] = {}
        self._durations = [0.05]
        """Durations of saves, in seconds: so that kills fall into them."""
        self._begun = 0.0

    def play(self, this: Round) -> None:
        """One round, and what there is to say of it."""
        draw = random.Random(f"kill {this.seed} {this.number}")
        reading, writing = os.pipe()
        resumes = bool(list_steps(self._run)) or self._committed > 0
        store = self._stores / str(this.number)
        pids = [fork_rank(this, rank, self._run, store, writing) for rank in range(this.world)]
        os.close(writing)
        lines = self._lines(reading)
        alone, early = draw.random() < 0.5, draw.random() < 0.15
        resumed, killed, joined = not resumes, False, 0
        wanted = draw.randint(0, SAVES)
        for line in lines:
            if line is None:
                self._report.unclear_ends += 1
                self._note(this, "ranks said nothing for a minute")
                break
            resumed = resumed or line.startswith("resumed")
            self._hear(this, line, told=not killed)
            wanted -= line.startswith("begins")
            joined += line.startswith("joined")
            # Early: while the run is looked at and loaded.
            due = joined == this.world if early else wanted <= 0 and resumed
            if due and not killed and not this.last:
                killed = True
                time.sleep(draw.uniform(0.0, 1.5 * statistics.median(self._durations[-50:])))
                victims = [draw.choice(pids)] if alone else draw.sample(pids, len(pids))
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                self._report.kills_of_one += alone
                self._report.kills_of_all += not alone
        for pid in pids:  # none that ended has been waited for, so no number is anybody else's yet
            os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.close(reading)
        if not (resumed or (early and killed)) or (this.last and any(codes)):
            self._report.blocked_resumes += 1
            self._note(this, f"the ranks did not resume, or not save: {codes}")
        self._look(this)

    def _lines(self, pipe: int) -> Iterator[str | None]:
        """What the ranks say until all have ended; None where they say nothing for too long."""
        rest = b""
        while True:
            if not select.select([pipe], [], [], PATIENCE_S)[0]:
                yield None
                return
            found = os.read(pipe, 1 << 16)
            if not found:
                return
            *whole, rest = (rest + found).split(b"\n")
            yield from (line.decode() for line in whole)

    def _hear(self, this: Round, line: str, *, told: bool) -> None:
        kind, *words = line.split(" ")
        if kind == "resumed":
            self._report.resumes += 1
            if int(words[0]) < self._committed:
                self._report.lost_steps += 1
                self._note(this, f"resumed from step {words[0]}; step {self._committed} was committed")
            self._compare(this, int(words[0]), words[1])
        elif kind == "begins":
            self._begun = time.monotonic()
            self._compare(this, int(words[0]), words[1])
        elif kind == "saved":
            self._durations.append(time.monotonic() - self._begun)
            self._report.saves += 1
            self._committed = int(words[0])
        elif kind == "left":
            self._report.left_behind += len(words)
            self._note(this, f"left behind: {', '.join(words)}")
        elif kind == "strange":
            self._report.unclear_ends += 1
            self._note(this, " ".join(words))
        elif kind == "error" and told:  # one after the kill is as it should be
            self._note(this, " ".join(words))

    def _compare(self, this: Round, step: int, found: str) -> None:
        if self._digests.setdefault(step, found) != found:
            self._report.damaged_steps += 1
            self._note(this, f"step {step} has other weights than at its first save")

    def _look(self, this: Round) -> None:
        """At the run, once all ranks are dead."""
        try:
            report = zerokit.verify(self._run)
        except zerokit.CheckpointError as error:
            if self._committed:
                self._report.lost_steps += 1
                self._note(this, str(error))
            return
        if not report.intact:
            self._report.damaged_steps += 1
            self._note(this, f"{report.path.name}: {report.findings}")
        if (report.step or 0) < self._committed:
            self._report.lost_steps += 1
            self._note(this, f"the newest is step {report.step}; step {self._committed} was committed")

    def _note(self, this: Round, text: str) -> None:
        self._report.notes.append(f"round {this.number}: {text}")


def play_all(report: Report, run: Path, stores: Path, *, quiet: bool, kind: str) -> None:
    """All rounds, and one that only resumes and saves."""
    islands = kind == "islands"
    rounds = Rounds(run, stores, report)
    draw = random.Random(report.seed)
    for number in range(report.rounds + 1):
        world = report.ranks if draw.random() < 0.8 else draw.randint(1 + islands, report.ranks)
        this = Round(
            number,
            report.seed,
            world,
            draw.randint(0, 3),
            exchanges=draw.random() < 0.7,
            background=kind == "background",
            frozen=kind == "frozen",
            tensorwise=kind == "tensorwise",
            islands=islands,
            last=number == report.rounds,
        )
        rounds.play(this)
        if not quiet and (number + 1) % 20 == 0:
            print(
                f"crash-rounds: {number + 1} rounds, {report.saves} saves, {report.faults} faults", flush=True
            )


def main() -> int:
    """See scripts/crash-rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of kills, worlds, stages and ways to save")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--kind", choices=KINDS, default="saves", help="what is killed")
    options = parser.parse_args()
    report = Report(options.rounds, options.seed, options.ranks)
    gc.freeze()  # what is imported is no rank's garbage
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerokit-crashes-")))
        (folder / "stores").mkdir()
        if options.kind == "conversions":
            play_conversions(report, folder, rounds=options.rounds, seed=options.seed)
        elif options.kind == "elastic":
            play_elastic(report, folder, rounds=options.rounds, seed=options.seed)
        elif options.kind == "sweeps":
            play_sweeps(report, folder, rounds=options.rounds, seed=options.seed)
        elif options.kind == "push":
            play_pushes(report, folder, rounds=options.rounds, seed=options.seed)
        else:
            play_all(report, folder / "run", folder / "stores", quiet=options.json, kind=options.kind)
    if options.json:
        print(json.dumps(asdict(report) | {"faults": report.faults}, indent=2))
    else:
        for key, value in asdict(report).items():
            if key != "notes":
                shown = ", ".join(f"{name} {n}" for name, n in value.items()) if key == "phases" else value
                print(f"{key.replace('_', ' '):16} {shown}")
        print("\n".join(report.notes))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
