"""States that visit a GPU, tried on hosts: no access that the device's order does not allow, and the same bits."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.runtime.test_device_control import CountedReads
from tests.support.clocks import COMPUTATION, Clocks, clocked
from tests.support.devices import SCENES, Scene, Training, at, lagging, prompt
from tests.support.on_ranks import on_ranks
from tests.support.training import SMALL
from zerokit.checkpoint.state import own_slices
from zerokit.runtime.homes import in_memory
from zerokit.runtime.homes.copies import CopyStream

PRECISIONS = ("bf16", "fp16", "fp32")


def _states(home: str, folder: Path) -> str:
    return str(folder) if home == "disk" else home


def _lose_gradients(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))


class Averaged(Training):
    """With an average of the weights, and a step that is left out for gradients that are not finite."""

    def __init__(self, scene: Scene, device: torch.device, **options: Any) -> None:
        super().__init__(scene, device, **options)
        self.average = zerokit.Ema(self.optimizer, 0.9)

    def step(self, number: int) -> None:
        self.differentiate(number)
        if number == 1:
            with self.optimizer.gathered_gradients():
                _lose_gradients(self)
        self.update()
        self.average.update()


def train_averaged(scene: Scene, device: torch.device, **options: Any) -> list[str]:
    training = Averaged(scene, device, **options)
    for step in range(training.run.steps):
        training.step(step)
    with training.average.applied():
        averages = training.weights()
    return [*training.bits(), averages]


def _expected(scene: Scene) -> list[str]:
    with prompt("cpu") as device, warnings.catch_warnings(action="ignore"):
        return train_averaged(scene, device)


@contextlib.contextmanager
def _on_a_gpu() -> Iterator[tuple[torch.device, Clocks]]:
    with lagging("cpu") as device, clocked() as clocks, warnings.catch_warnings(action="ignore"):
        yield device, clocks


@on_ranks(
    2,
    [
        (home, name, PRECISIONS[number % 3], number % 4)
        for home in ("host", "disk")
        for number, name in enumerate(("plain", "accumulation", "whole tensors", "frozen", "unused", "tied"))
    ],
)
def test_visits_are_in_the_devices_order_and_change_no_bit(
    given: tuple[str, str, str, int], tmp_path: Path
) -> None:
    """At odd stages with units of which a rank has no elements."""
    home, name, precision, stage = given
    scene = at(SCENES[name], precision=precision, stage=stage)
    if stage % 2:
        scene = at(scene, bucket_mb=SMALL)
    expected = _expected(scene)
    with _on_a_gpu() as (device, clocks):
        assert train_averaged(scene, device, states=_states(home, tmp_path)) == expected
    assert not clocks.faults, (len(clocks.faults), clocks.faults[0])
    assert clocks.seen[COMPUTATION] > 100
    assert clocks.seen["the stream in"] > 100


@on_ranks(2, [(precision, stage) for precision in ("bf16", "fp32") for stage in (0, 3)])
def test_the_host_waits_for_no_visit(given: tuple[str, int]) -> None:
    precision, stage = given
    with _on_a_gpu() as (device, clocks):
        training = Averaged(at(SCENES["plain"], precision=precision, stage=stage), device, states="host")
        for step in range(3):
            training.step(step)
        assert clocks.waits == 0
        training.optimizer.state_dict()
        assert clocks.waits == 0  # which brings states to the device
        assert list(own_slices(training.optimizer.runtime, dist.get_rank()))
        assert clocks.waits > 0


@on_ranks(2, [(home, stage) for stage in (1, 3) for home in ("fp8", "host")])
def test_a_step_reads_nothing_more_than_on_the_device(given: tuple[str, int]) -> None:
    """The numbers of the step before, once; encoding and decoding are the computation's own."""
    home, stage = given
    with _on_a_gpu() as (device, _):
        training = Training(at(SCENES["plain"], precision="bf16", stage=stage), device, states=home)
        training.step(0)
        training.step(1)
        with CountedReads() as reads:
            training.step(2)
    reads.counts.pop("numpy", None)  # the copies of `clocks`
    assert reads.counts == {"tolist": 1}


def _save_and_go(training: Training, folder: Path) -> list[str]:
    """Saves between steps, one of them in the background while the next steps write; then the model is released."""
    files = []
    for step in range(training.run.steps):
        training.step(step)
        # The next save waits for the one in the background.
        if step == 1:
            zerokit.save(folder, training.optimizer, step=step + 1, blocking=False)
        else:
            zerokit.save(folder, training.optimizer, step=step + 1)
    bits = training.bits()
    if dist.get_rank() == 0:
        for path in sorted(folder.glob("step-*/*.safetensors")):
            files.append(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}")
        assert files
    zerokit.release(training.model)
    return [*bits, *files]


@on_ranks(2, [(home, name) for home in ("device", "host", "disk") for name in ("plain", "whole tensors")])
def test_saves_are_those_of_the_device(given: tuple[str, str], tmp_path: Path) -> None:
    home, name = given
    scene = at(SCENES[name], precision="bf16", stage=2)
    folders = [tmp_path / f"{home} {name} {way}" for way in ("expected", "found", "states")]
    if dist.get_rank() == 0:
        folders[2].mkdir()
    dist.barrier()
    with prompt("cpu") as device, warnings.catch_warnings(action="ignore"):
        expected = _save_and_go(Training(scene, device), folders[0])
    with _on_a_gpu() as (device, clocks):
        training = Training(scene, device, states=_states(home, folders[2]))
        found = _save_and_go(training, folders[1])
        del training
        gc.collect()
    assert not clocks.faults, (len(clocks.faults), clocks.faults[0])
    assert found == expected


IN, OUT = "the stream in", "the stream out"

MUTATIONS = {
    "nothing": ("host", "", ""),
    "nothing, on a disk": ("disk", "", ""),
    "what comes overwrites what the computation still uses": ("host", "mark", "fetch"),
    "what comes overwrites what still leaves": ("host", "after", OUT),
    "what is still computed leaves": ("host", "mark", "put"),
    "the computation reads what has not come": ("host", "wait", IN),
    "buffers are given back while units leave": ("host", "wait", OUT),
    "a save reads what has not left": ("host", "arrive", "stored"),
    "memory of released units is given back while they leave": ("host", "arrive", "forget"),
    "memory of a dropped optimizer is given back while units leave": ("host", "arrive", "__call__"),
    "what comes from a file overwrites what the computation uses": ("disk", "mark", "fetch"),
    "what is still computed leaves for a file": ("disk", "mark", "put"),
    "the computation reads what has not come from a file": ("disk", "arrive", "_end"),
    "a piece is read into while it is copied": ("disk", "arrive", "read"),
    "a piece is written that has not come": ("disk", "arrive", "first"),
}


@on_ranks(2, MUTATIONS)
def test_a_wait_that_is_missing_is_seen(name: str, tmp_path: Path) -> None:
    """And no fault where nothing is missing."""
    home, *without = MUTATIONS[name]
    scene = at(SCENES["plain"], precision="bf16", stage=2, steps=2)
    with _on_a_gpu() as (device, clocks):
        clocks.without = without[0], without[1]
        for released in (True, False):
            training = Training(scene, device, states=_states(home, tmp_path))
            training.step(0)
            with contextlib.suppress(zerokit.ZerokitError):
                for held in own_slices(training.optimizer.runtime, dist.get_rank()):
                    in_memory(held.tensor).clone()
                training.step(1)
            if released:
                zerokit.release(training.model)
            del training
            gc.collect()
    assert bool(clocks.faults) == any(without), (name, clocks.faults[:1])


@on_ranks(2, (0, 1))
def test_a_disk_that_fails_leaves_no_copy_behind(failing: int, tmp_path: Path) -> None:
    """A read fails on one rank while the piece before is on its way: all ranks raise before any update."""
    with _on_a_gpu() as (device, clocks):
        training = Training(at(SCENES["plain"], precision="bf16"), device, states=str(tmp_path))
        training.step(0)
        before = training.weights()
        training.differentiate(1)
        if dist.get_rank() == failing:
            clocks.reads_left = 1
        with pytest.raises(
            zerokit.errors.StorageError, match="short read" if clocks.reads_left else "could not read"
        ):
            training.optimizer.step()
        gc.collect()  # what the error's frames hold
        assert training.weights() == before
        del training
        gc.collect()
    assert not clocks.faults, clocks.faults[0]


def test_streams_of_a_gpu_wait_for_what_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ClockedStream` stands for, against torch's own calls."""
    said: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = str(name)

        def wait_event(self, event: Any) -> None:
            said.append((self.name, f"waits for {event.name}"))

        def record_event(self) -> Any:
            said.append((self.name, "records"))
            return SimpleNamespace(
                name=self.name, synchronize=lambda: said.append(("host", f"waits for {self.name}"))
            )

        def synchronize(self) -> None:
            said.append(("host", f"waits for all of {self.name}"))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    stream = CopyStream(torch.device("cpu"))
    now, into = stream.mark(), torch.zeros(3)
    moved = stream.copy([(into, torch.ones(3))], [now])
    moved.wait()
    moved.arrive()
    stream.arrive()
    assert into.tolist() == [1.0] * 3
    assert said == [
        ("current", "records"),
        ("cpu", "waits for current"),
        ("cpu", "records"),
        ("current", "waits for cpu"),
        ("host", "waits for cpu"),
        ("host", "waits for all of cpu"),
    ]
