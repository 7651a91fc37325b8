"""The timed loop: batches, warm-up that all ranks end together, progress, errors that say what they are."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench.clocks import Device
from tests.bench.records import make_record
from tests.support.distributed import run_alone, run_ranks
from zerokit.bench.engines.trainer import Batch, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.measured import Rank
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import STEADY_WINDOW
from zerokit.bench.record.status import Outcome, Progress, Status, oom_kills, read_outcome
from zerokit.bench.worker.checkpoints import Keeper
from zerokit.bench.worker.measured import Measured
from zerokit.bench.worker.rank import choose, with_state
from zerokit.bench.worker.training import Batches, Loop
from zerokit.bench.workloads.build import load

HERE = Accelerator(torch.device("cpu"), "gloo")
TINY = Settings(model="mlp-mnist", engine="compute-only", stage=0, steps=3, nproc_per_node=2)
ALONE = replace(TINY, steps=4, nproc_per_node=1)
SLOW_STEPS = STEADY_WINDOW + 2


@dataclass
class Settling(Trainer):
    """Its first steps take long on the second rank alone: only together do the ranks know when to begin."""

    slow_steps: int
    seen: list[list[Batch]] = field(default_factory=list)

    def forward(self, batch: Batch) -> Tensor:
        return torch.ones(())

    def backward(self, loss: Tensor) -> None:
        pass

    def update(self) -> None:
        pass

    def step(self, batches: object, mark: object = None) -> tuple[list[Tensor], Tensor | None]:
        assert isinstance(batches, list)
        self.seen.append(batches)
        slow = dist.get_rank() == 1 and len(self.seen) <= self.slow_steps
        time.sleep(0.2 if slow else 0.03)
        return [torch.tensor(float(len(self.seen))), torch.tensor(float(len(self.seen) + 2))], torch.tensor(
            7.0
        )


def run(settings: Settings, slow_steps: int, path: str) -> tuple[Measured, int, int]:
    """On a rank: the loop; also when the measured steps began, and how many different batches there were."""
    trainer = Settling(slow_steps)
    loop = Loop(trainer, load(settings), settings, HERE)
    began: list[int] = []
    file = Path(path) if dist.get_rank() == 0 else None
    measured = loop.run(file, Keeper(settings, None), begin=lambda: began.append(len(trainer.seen)))
    (begin,) = began
    different = {tuple(batch[0].flatten().tolist()) for batches in trainer.seen for batch in batches}
    return measured, begin, len(different)


def run_each(folder: str) -> list[tuple[Measured, int, int]]:
    """On a rank: a warm-up that ends by itself, and two that were given."""
    asked = [replace(TINY, accumulate=2), replace(TINY, warmup=0), replace(TINY, warmup=2)]
    slow = [SLOW_STEPS, 0, 0]
    return [run(one, slow[number], f"{folder}/{number}") for number, one in enumerate(asked)]


def test_warm_up_is_the_given_one_or_ends_on_all_ranks_when_the_slowest_is_steady(tmp_path: Path) -> None:
    found = run_ranks(2, run_each, str(tmp_path))
    warmup = found[0][0][0].warmup
    # The shortest warm-up is not enough while the last window but one still holds slow steps.
    assert warmup >= SLOW_STEPS + STEADY_WINDOW
    for (measured, began, batches), *given in found:
        assert measured.warmup == warmup == began
        assert len(measured.step_ms) == len(measured.loss) == warmup + 3 == measured.trained
        assert measured.loss[:2] == [2.0, 3.0]  # the mean over micro-batches
        assert set(measured.gradient_norm) == {7.0}
        assert batches == 2 * measured.trained
        assert min(measured.step_ms) >= 30.0
        counts = [(one.warmup, began, one.trained) for one, began, _ in given]
        assert counts == [(0, 0, 3), (2, 2, 5)]
    lines = [Progress(*json.loads(line)) for line in (tmp_path / "0").read_text().splitlines()]
    assert len(lines) == warmup + 3
    assert (lines[-1].done, lines[-1].total, lines[-1].warmup) == (warmup + 3, warmup + 3, warmup)
    assert lines[0].total == 2 * STEADY_WINDOW + 1 + 3  # meanwhile the least is expected


@dataclass
class Ahead(Trainer):
    """Each step is 10 ms of a made-up device's work, and everything that happens is noted in the device's log."""

    device: Device

    def forward(self, batch: Batch) -> Tensor:
        return batch[0].sum() * 0.0 + self.device.asked_ms

    def backward(self, loss: Tensor) -> None:
        self.device.log.append("step")
        self.device.work(10.0)

    def update(self) -> Tensor:
        return torch.tensor(self.device.asked_ms)


class Noting(TorchDispatchMode):
    """Notes numbers that the host reads from tensors: on CUDA it waits for each."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._log.append("read")
        return func(*args, **(kwargs or {}))


class Saving(Keeper):
    """Would save; `after_step` does whatever the device is at."""

    def __init__(self, settings: Settings, device: Device) -> None:
        super().__init__(settings, None)
        self._device = device

    def due(self, trained: int, *, last: bool) -> bool:
        return last or trained % 3 == 0

    def after_step(self, done: Measured, *, last: bool) -> None:
        if self.due(done.trained, last=last):
            self._device.log.append("save")
            self._device.work(500.0)


def run_ahead(settings: Settings, path: str, saving: bool) -> tuple[Measured, list[str], list[str]]:
    """On a rank: what was measured, what happened from the measured steps' beginning on, and before."""
    device = Device()
    loaded = load(settings)
    make = loaded.batch

    def noted(first: int) -> tuple[Tensor, ...]:
        device.log.append("batch")
        return make(first)

    keeper = Saving(settings, device) if saving else Keeper(settings, None)
    rarely = patch("zerokit.bench.worker.training._PROGRESS_SECONDS", 3600.0)
    with Noting(device.log), patch.object(loaded, "batch", noted), rarely:
        loop = Loop(Ahead(device), loaded, settings, HERE, device.clock)
        measured = loop.run(Path(path), keeper, begin=lambda: device.log.append("begin"))
    begun = device.log.index("begin")
    return measured, device.log[begun + 1 :], device.log[:begun]


def test_on_a_device_nothing_is_made_read_or_waited_for_between_measured_steps(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    ((measured, log, before),) = run_ranks(1, run_ahead, replace(ALONE, warmup=2), str(path), False)
    assert log == [
        *("synchronize", "record"),
        *["step", "record"] * 4,
        "synchronize",
        *["read", "read"] * 4,  # a loss and a norm each
    ]
    # Warm-up looks at every step; then the batches of the measured ones are made.
    looked_at = ["synchronize", "record", "step", "record", "synchronize", "read", "read"]
    assert [what for what in before if what != "batch"] == looked_at * 2
    assert before[-4:] == ["batch"] * 4
    assert measured.step_ms == [10.0] * 6
    assert measured.window_ms is not None
    # Losses and norms are each step's own, although they were read after the last one.
    assert measured.loss == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert measured.gradient_norm == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert (measured.warmup, measured.trained, measured.batches_repeat_after) == (2, 6, None)
    assert measured.batch_bytes == 4 * ALONE.batch_size * (28 * 28 * 4 + 8)
    written = [Progress(*json.loads(line)) for line in path.read_text().splitlines()]
    assert written[-1] == Progress(6, 6, 2, 50.0, 10.0)
    # Only the first measured step before it: more would cost time, and none knows its loss yet.
    assert [one for one in written if 2 < one.done < 6] == [Progress(3, 6, 2, None, None)]


def test_a_device_has_done_its_steps_before_they_are_saved_and_saving_is_not_timed(tmp_path: Path) -> None:
    ((measured, log, _),) = run_ranks(1, run_ahead, replace(ALONE, warmup=0), str(tmp_path / "p"), True)
    window = ["synchronize", "record"], ["synchronize"]
    assert log == [
        *(*window[0], *["step", "record"] * 3, *window[1], *["read", "read"] * 3, "save"),
        *(*window[0], *["step", "record"] * 1, *window[1], *["read", "read"] * 1, "save"),
    ]
    assert measured.step_ms == [10.0] * 4


def test_a_rank_fills_in_what_was_left_open() -> None:
    asked = Settings(model="gpt-tiny", seq_len=16)
    chosen = choose(asked, HERE)
    assert (chosen.device, chosen.precision, chosen.data) == ("cpu", "fp32", "standard-library")
    assert (chosen.bucket_mb, chosen.image_size, chosen.warmup) == (None, None, None)
    on_cuda = choose(replace(asked, engine="fsdp2", stage=3), Accelerator(torch.device("cuda"), "nccl"))
    assert (on_cuda.device, on_cuda.precision, on_cuda.bucket_mb) == ("cuda", "bf16", None)
    images = choose(replace(asked, model="mlp-mnist", precision="bf16"), HERE)
    assert (images.image_size, images.precision, images.data) == (28, "bf16", "synthetic")


def test_the_kernels_count_of_killed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, count in (("nr_free_pages 5\noom_kill 3\n", 3), ("nr_free_pages 5\n", None)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert oom_kills() == count


def run_out_of_memory(job: str) -> str:
    """In a process of its own, with far less address space than the model takes."""
    from zerokit.bench.worker import rank as worker

    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"), MASTER_ADDR="127.0.0.1")
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.init_process_group = lambda *arguments, **options: None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    with pytest.raises(worker.OutOfMemory) as caught:
        worker.main(Path(job))
    return str(caught.value)


def test_running_out_of_memory_is_noted_beside_the_job(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    settings = replace(ALONE, model="gpt2-124m", seq_len=16, batch_size=1, data="synthetic")
    record = tmp_path / "record.json"
    job.write_text(json.dumps({"settings": to_plain(settings), "record": str(record), "progress": None}))
    message = run_alone(run_out_of_memory, str(job))
    status = read_outcome(job)
    assert status is not None
    assert status == Outcome(Status.OUT_OF_MEMORY, message)
    assert "gpt2-124m (124.4 M parameters), compute-only stage 0, 1 ranks" in message
    assert "higher --stage" in message
    assert not record.exists()


def states() -> list[Rank]:
    """On a rank, at every stage; a unit of one parameter keeps autograd's own gradient, which zeroing drops."""
    found = []
    for stage in range(4):
        settings = Settings(model="gpt-tiny", seq_len=16, stage=stage, bucket_mb=1e-6, nproc_per_node=2)
        settings = replace(settings, steps=1, warmup=1, precision="fp32")
        loaded = load(settings)
        trainer = make(loaded, settings, HERE)
        loop = Loop(trainer, loaded, settings, HERE)
        loop.run(None, Keeper(settings, None), begin=lambda: None)
        found.append(with_state(make_record().ranks[dist.get_rank()], trainer, loop))
    return found


def test_state_is_counted_while_gradients_are_there() -> None:
    for rank in (one for found in run_ranks(2, states) for one in found):
        assert rank.memory_bytes == rank.predicted_memory_bytes
        assert rank.memory_bytes["gradients"] > 0


SETTINGS = Settings(model="linear", batch_size=4, accumulate=2)
CPU = torch.device("cpu")


A_STEP = SETTINGS.samples_per_step


def seen(batches: Batches, position: int) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in batches.of(position)]


@dataclass(frozen=True)
class Case:
    """Steps that are asked for, of which so many fit (None: the usual limit), and what is expected.

    `ready`: how many steps' batches lie ready; `of`: of which step the batches of each step are.
    """

    ahead: bool
    fitting: float | None
    first: int
    count: int
    ready: int
    repeat_after: int | None
    of: list[int]
    made: list[int]
    elastic: bool = False


CASES = [
    Case(False, None, 3, 4, 0, None, [3, 4, 5, 6], [3, 4, 5, 6]),
    Case(True, None, 3, 4, 4, None, [3, 4, 5, 6], []),
    Case(True, 3.5, 2, 6, 3, 3, [2, 0, 1, 2, 0, 1], []),
    Case(True, 3.5, 5, 2, 2, 3, [2, 0], []),  # resumed: the batches that an uninterrupted run has there
    Case(True, 0.5, 0, 3, 1, 1, [0, 0, 0], []),
    Case(True, 2.5, 2, 4, 2, None, [2, 3, 4, 5], [4, 5], elastic=True),
]


def prepare_each() -> list[Case]:
    """On a rank: the cases as they are found."""
    found = []
    for case in CASES:
        settings = replace(SETTINGS, elastic=case.elastic, save="run")
        loaded = load(settings)
        of_a_step = 2 * sum(part.numel() * part.element_size() for part in loaded.batch(0))
        fresh = Batches(loaded, settings, CPU, ahead=False)
        original = {step: seen(fresh, step * A_STEP) for step in range(case.first + case.count)}
        limit = {} if case.fitting is None else {"limit_bytes": int(case.fitting * of_a_step)}
        batches = Batches(loaded, settings, CPU, ahead=case.ahead, **limit)
        size = batches.prepare(case.first * A_STEP, case.count)
        with patch.object(loaded, "batch", wraps=loaded.batch) as make:
            shown = [seen(batches, step * A_STEP) for step in range(case.first, case.first + case.count)]
        made = sorted({call.args[0] // A_STEP for call in make.call_args_list})
        of = [next(step for step in original if original[step] == one) for one in shown]
        assert size % of_a_step == 0
        ready, repeat_after = size // of_a_step, batches.repeat_after
        found.append(replace(case, ready=ready, repeat_after=repeat_after, of=of, made=made))
        batches.drop()
        assert seen(batches, case.first * A_STEP) == shown[0]
    return found


def test_batches_lie_ready_and_take_turns_where_they_do_not_fit() -> None:
    """But not those of an elastic run, which waits for what does not fit."""
    assert run_ranks(1, prepare_each) == [CASES]


def test_a_step_takes_the_next_samples_and_every_rank_has_its_own() -> None:
    """Over all their micro-batches; at other world sizes tests/cli/test_elastic follows the samples."""
    loaded, taken = load(SETTINGS), list[int]()
    for rank in range(3):
        batches = Batches(loaded, replace(SETTINGS, nproc_per_node=3), CPU, ahead=False)
        with (
            patch.object(loaded, "batch", wraps=loaded.batch) as make,
            patch.object(dist, "get_rank", return_value=rank),
            patch.object(dist, "get_world_size", return_value=3),
        ):
            batches.of(12)
        taken += [call.args[0] + n for call in make.call_args_list for n in range(SETTINGS.batch_size)]
    assert sorted(taken) == list(range(12, 12 + 3 * A_STEP))
