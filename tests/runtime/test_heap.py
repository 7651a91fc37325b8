"""What is asked of the C library, and when; test_memory shows what it does."""

from __future__ import annotations

import sys

import pytest
import torch

from zerokit.runtime import memory
from zerokit.runtime.memory import Heap, keep_freed_memory

TRIM = ("malloc_trim", 0)
KEEP = ("mallopt", -1, -1)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux heaps are adjusted")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | int, ...]]:
    made: list[tuple[str | int, ...]] = []
    monkeypatch.setattr(memory, "_call", lambda name, *arguments: made.append((name, *arguments)))
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return made


@pytest.mark.parametrize("settles", [True, False])
def test_with_a_model_on_a_device_nothing_is_called(
    settles: bool, calls: list[tuple[str | int, ...]]
) -> None:
    one = Heap(torch.device("cuda"), settles=settles)
    for _ in range(6):
        one.note_forward()
        one.return_freed_memory()
    assert calls == []


def test_on_other_systems_nothing_is_called(
    calls: list[tuple[str | int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    one = Heap(torch.device("cpu"), settles=True)
    for _ in range(6):
        one.note_forward()
    one.return_freed_memory()
    assert calls == []


@on_linux
def test_a_heap_that_settles_is_trimmed_thrice_and_then_keeps_what_it_has(
    calls: list[tuple[str | int, ...]],
) -> None:
    one = Heap(torch.device("cpu"), settles=True)
    for _ in range(6):
        one.note_forward()
    assert calls == [TRIM, TRIM, TRIM, KEEP]


@on_linux
def test_where_units_come_and_go_every_pass_returns_memory(calls: list[tuple[str | int, ...]]) -> None:
    one = Heap(torch.device("cpu"), settles=False)
    for _ in range(6):
        one.note_forward()
    one.return_freed_memory()
    assert calls == [TRIM] * 7


@pytest.mark.parametrize(
    ("variable", "value", "asked"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "65536", False),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536", False),
        ("GLIBC_TUNABLES", "glibc.malloc.check=3", True),
    ],
)
def test_what_the_environment_says_stands(
    variable: str,
    value: str,
    asked: bool,
    calls: list[tuple[str | int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    keep_freed_memory()
    assert calls == ([KEEP] if asked else [])


def test_another_c_library_is_left_alone() -> None:
    memory._call("a_function_that_no_library_has", 1)
