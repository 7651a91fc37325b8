"""What the runtime asks of the host's allocator, what that does, and where the pages of units go."""

from __future__ import annotations

import gc
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_alone
from tests.support.recording import plain_unit
from zerokit.layout import Interval
from zerokit.runtime import memory
from zerokit.runtime.memory import Heap, MappedMemory, keep_freed_memory

TRIM, KEEP = ("malloc_trim", 0), ("mallopt", -1, -1)
ADVISE = ("sbrk", 0)  # huge pages for a heap that ends there: for none


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | int, ...]]:
    made: list[tuple[str | int, ...]] = []

    def function(name: str) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            made.append((name, *arguments))
            return 0

        return call

    monkeypatch.setattr(memory, "_function", function)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return made


@pytest.mark.parametrize(
    ("system", "device", "settles", "expected"),
    [
        ("linux", "cuda", True, []),
        ("linux", "cuda", False, []),
        ("darwin", "cpu", True, []),
        ("linux", "cpu", True, [*(TRIM, ADVISE) * 3, KEEP, TRIM, ADVISE]),
        ("linux", "cpu", False, [TRIM, ADVISE] * 7),  # units come and go
    ],
)
def test_a_heap_is_trimmed_until_it_has_settled(
    system: str,
    device: str,
    settles: bool,
    expected: list[object],
    calls: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    heap = Heap(torch.device(device), settles=settles)
    for _ in range(6):
        heap.note_forward()
    heap.return_freed_memory()
    assert calls == expected


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "65536", []),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536", []),
        ("GLIBC_TUNABLES", "glibc.malloc.check=3", [KEEP]),
    ],
)
def test_what_the_environment_says_stands(
    variable: str, value: str, expected: list[object], calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    keep_freed_memory()
    assert calls == expected


def test_another_c_library_is_left_alone() -> None:
    memory._function("a_function_that_no_library_has")(1)


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt and malloc_trim are glibc's")

_KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
_SHORT, _LONG = 300_000, 3_000_000
"""Elements whose memory outside the shard is too short for huge pages, and long enough for them."""


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _units(numel: int, count: int, dtype: torch.dtype = torch.float32) -> list[MappedMemory]:
    units = [MappedMemory(plain_unit(0, numel, 1), Interval(5000, 6000), dtype) for _ in range(count)]
    for unit in units:
        unit.shrink()
    return units


@on_glibc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [6100, _SHORT, _LONG])  # the first with no whole page behind the shard
def test_freed_memory_reads_as_nan_and_the_shard_stays(numel: int, dtype: torch.dtype) -> None:
    for number, unit in enumerate(_units(numel, 3, dtype) * 2):
        unit.kept.tensor.fill_(number)
        unit.grow()
        if numel == _SHORT:  # where other units' pages may come
            assert unit.whole.tensor[7000:].isnan().all()
        unit.whole.tensor.fill_(number)
        unit.shrink()
        assert unit.whole.tensor[6000:].isnan().all()
        assert unit.whole.tensor[:5000].isnan().all()
        assert unit.kept.tensor.eq(number).all()


def _faults_of_engine(same: bool) -> int:
    """Page faults of writing a unit behind the free of itself, or of another one of its size."""
    earlier, later = _units(_SHORT, 2)
    for _ in range(3):
        for unit in (earlier, later):
            unit.grow()
            unit.whole.tensor.fill_(1.0)
            unit.shrink()
        unit = later if same else earlier
        start = _faults()
        unit.grow()
        unit.whole.tensor.fill_(1.0)
        faults = _faults() - start
        unit.shrink()
    return faults


@on_glibc
@pytest.mark.parametrize("same", [True, False])
def test_a_unit_takes_pages_that_were_freed(same: bool) -> None:
    faults = run_alone(_faults_of_engine, same)
    pages = _SHORT * 4 // resource.getpagesize()
    if same or _KERNEL >= (5, 13):  # an older kernel cannot move pages of a mapped file
        assert faults < pages // 10


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def _mebibytes_kept() -> int:
    """What stays of many units of different sizes that were all freed."""
    gc.collect()
    before = _resident_mib()
    units = [_units(_SHORT + 2000 * number, 1)[0] for number in range(60)]
    for unit in units:
        unit.grow()
        unit.whole.tensor.fill_(1.0)
    for unit in units:
        unit.shrink()
    return _resident_mib() - before


@on_glibc
def test_a_few_mib_stay_of_freed_memory() -> None:
    assert run_alone(_mebibytes_kept) < 20  # of 80
