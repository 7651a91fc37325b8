"""Saves and loads of a state on a GPU, tried on hosts: through pinned memory, in the device's order, the same bytes."""

from __future__ import annotations

import hashlib
import mmap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerokit
from tests.support.clocks import PIECE, ClockedStream, Clocks, clocked
from tests.support.devices import SCENES, Training, at, lagging, prompt
from tests.support.on_ranks import on_ranks
from zerokit.checkpoint.landing import Landing
from zerokit.checkpoint.staged import contents, staging_for, through
from zerokit.errors import ZerokitWarning
from zerokit.runtime import homes, host_copy
from zerokit.runtime.homes.copies import CopyStream
from zerokit.runtime.homes.disk import DiskHome
from zerokit.runtime.homes.staging import Staging
from zerokit.runtime.host_copy import HostCopy

HOST = torch.device("cpu")
IN, OUT = "the stream in", "the stream out"


def _digests(step: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(step.glob("*.safetensors"))]


@on_ranks(
    2, [("fp32", 0, "plain"), ("bf16", 3, "plain"), ("bf16", 2, "frozen"), ("fp16", 1, "whole tensors")]
)
def test_a_state_on_a_device_is_saved_and_loaded_through_pinned_memory(
    given: tuple[str, int, str], tmp_path: Path
) -> None:
    precision, stage, name = given
    scene = at(SCENES[name], precision=precision, stage=stage, steps=2)
    folder = tmp_path / f"{precision} {stage} {name}"
    with prompt("cpu") as device, warnings.catch_warnings(action="ignore"):
        training = Training(scene, device)
        training.step(0)
        plain = zerokit.save(folder / "plain", training.optimizer, step=1)
        training.step(1)
        expected = training.bits()
    with lagging("cpu") as device, clocked() as clocks, warnings.catch_warnings(action="ignore"):
        training = Training(scene, device)
        zerokit.load(plain, training.optimizer)
        copies = [clocks.seen[IN]]
        found = zerokit.save(folder / "staged", training.optimizer, step=1)
        copies += [clocks.seen[IN] - copies[0], clocks.seen[OUT]]
        beside = zerokit.save(folder / "beside", training.optimizer, step=1, blocking=False).wait()
        copies.append(clocks.seen[OUT])
        training.step(1)
    assert not clocks.faults, (len(clocks.faults), clocks.faults[0])
    assert _digests(plain) == _digests(found) == _digests(beside)
    assert training.bits()[-1] == expected[-1]
    # All of this rank's file, at most a piece at a time; for a save beside the training on the other stream.
    least = (plain / f"rank-{dist.get_rank():05d}-of-00002.safetensors").stat().st_size // PIECE - 1
    assert copies[1] >= least
    assert copies[2] == 0
    if name != "whole tensors":  # which a rank loads for itself, and saves from all ranks' memory
        assert copies[0] >= least
        assert copies[3] >= least * PIECE // (2 * mmap.PAGESIZE)


def _fill(landing: Landing, clocks: Clocks, numbers: Iterator[int], into: Tensor) -> None:
    lent = landing.lend(into.nbytes)
    assert lent is not None
    clocks.touch(lent.data_ptr(), lent.nbytes, None, writes=True)
    lent.fill_(next(numbers))
    landing.send(lent, into)


@pytest.mark.parametrize("without", ["", "lend"])
def test_a_piece_is_lent_again_once_its_copies_have_ended(without: str) -> None:
    with clocked() as clocks:
        clocks.without = ("arrive", without)
        stream = ClockedStream(clocks, IN)
        landing = Landing(stream)
        size = PIECE // 2 - 64  # two in a piece
        target = torch.zeros(9, size, dtype=torch.uint8)
        for row, number in zip(target, range(9), strict=True):
            _fill(landing, clocks, iter([number]), row)
        clocks.without = ("", "")
        stream.arrive()
        assert landing.lend(PIECE + 1) is None
        assert torch.equal(target, torch.arange(9, dtype=torch.uint8)[:, None].expand_as(target))
        del landing
    assert bool(clocks.faults) == bool(without)


def test_the_bytes_of_tensors_come_in_order_whatever_their_size_and_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some cut over several pieces, some together in one, some empty; and some that are on the host already."""
    sizes = (5, 0, PIECE * 3, PIECE // 4 - 1, 1, PIECE // 4 + 7, 40)
    tensors = [torch.randn(size) for size in sizes]
    tensors[2] = tensors[2].view(2, -1).t()
    expected = [bytes(one.contiguous().view(-1).view(torch.uint8).tolist()) for one in tensors]
    with clocked() as clocks:
        for device in (HOST, torch.device("meta")):  # as if it were another one than that of the tensors
            monkeypatch.setattr(ClockedStream, "device", device, raising=False)
            with through(device, staging_for("tests")) as staging:
                assert staging is not None
                staging.stream.device = device
                found = [b""] * len(tensors)
                for batch in contents(tensors, staging):
                    assert sum(content.nbytes for _, content in batch) <= PIECE
                    for number, content in batch:
                        found[number] += bytes(content)
            assert found == expected
    assert not clocks.faults
    assert clocks.seen[IN] > 3


class Cudart:
    """Calls of CUDA's runtime, which refuses memory with the error `status`."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}
        self.threads: set[str] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.threads.add(threading.current_thread().name)
        if not self.status:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


class PromptCopies(CopyStream):
    """A stream whose copies are made at once, each within one piece of registered memory."""

    def __init__(self, cudart: Cudart, device: torch.device = HOST) -> None:
        self.cudart, self.device = cudart, device

    def mark(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace()

    def copy(self, pairs, after):  # type: ignore[no-untyped-def]
        for into, source in pairs:
            first, last = into.data_ptr(), into.data_ptr() + into.nbytes
            if not self.cudart.status:
                assert any(a <= first and last <= a + n for a, n in self.cudart.registered.items())
            into.copy_(source)
        return SimpleNamespace()

    def arrive(self) -> None:
        pass


STATE = [torch.randn(size) for size in (3, 5000, 0, 70, 9000)]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(host_copy, "_PIECE", 2 * mmap.PAGESIZE)
    return made


def test_memory_of_a_host_copy_is_registered_once_beside_copies_into_it(cudart: Cudart) -> None:
    memory = HostCopy(HostCopy.size_of(STATE), PromptCopies(cudart))
    for factor in (1.0, 2.0):
        state = [tensor * factor for tensor in STATE]
        copies = memory.fill(state)
        assert all(torch.equal(copy, one) for copy, one in zip(copies, state, strict=True))
        assert sum(cudart.registered.values()) == memory.nbytes
    assert len(cudart.registered) == -(-memory.nbytes // (2 * mmap.PAGESIZE))
    assert "MainThread" not in cudart.threads
    del memory, copies
    assert not cudart.registered


def test_memory_that_cuda_does_not_register_is_said_and_filled_all_the_same(cudart: Cudart) -> None:
    cudart.status = 2
    with pytest.warns(ZerokitWarning, match=r"does not register memory for background saves \(error 2"):
        copies = HostCopy(HostCopy.size_of(STATE), PromptCopies(cudart)).fill(STATE)
    assert all(torch.equal(copy, one) for copy, one in zip(copies, STATE, strict=True))


def test_on_a_host_nothing_is_registered(cudart: Cudart) -> None:
    assert homes.streams_for(HOST) is None
    memory = HostCopy(HostCopy.size_of(STATE))
    assert all(torch.equal(copy, one) for copy, one in zip(memory.fill(STATE), STATE, strict=True))
    assert not cudart.threads


def test_threads_that_call_cuda_are_on_the_device_of_their_rank(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new thread is on the machine's first GPU, and would begin a context there."""
    placed: set[tuple[str, torch.device]] = set()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: placed.add((threading.current_thread().name, device))
    )
    third = torch.device("cuda", 3)
    stream = PromptCopies(cudart, third)
    HostCopy(HostCopy.size_of(STATE), stream).fill(STATE)
    assert {name for name, device in placed if device == third} >= cudart.threads
    home = DiskHome(tmp_path, {}, Staging(stream, PIECE))
    home.put([], torch.zeros(0)).wait()
    assert ("zerokit-states_0", third) in placed
