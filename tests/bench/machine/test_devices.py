"""Devices as CUDA would show them, on a machine that has none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from zerokit.bench.catalogue import engines
from zerokit.bench.machine import host as devices
from zerokit.bench.machine.host import (
    Gpu,
    find_gpus,
    torch_uses_cuda,
    visible,
    visible_devices,
    visible_names,
)

FOUR = [Gpu(f"GPU-{letter}1-{letter}2", 80 * 2**30) for letter in "abcd"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 3 , 1 ", [3, 1]),
        ("0,-1,2", [0]),
        ("0,7,1", [0]),  # CUDA stops at what it does not know
        ("GPU-c1-c2,GPU-a", [2, 0]),
        ("GPU-", []),  # of four: ambiguous
        ("1,GPU-x", [1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(listed: str | None, expected: list[int]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible(FOUR, environment) == [FOUR[index] for index in expected]


def test_of_slices_cuda_shows_one() -> None:
    listed = {"CUDA_VISIBLE_DEVICES": "MIG-1-2,MIG-3-4"}
    assert visible_names(listed) == ["MIG-1-2", "MIG-3-4"]
    assert visible(FOUR, listed) == [Gpu("MIG-1-2", None)]
    assert visible([], listed) == []


def test_nvidia_smi_is_asked_first(tmp_path: Path) -> None:
    query = (sys.executable, "-c", "print('GPU-a, 81559\\nGPU-b, 143771')")
    assert find_gpus(tmp_path, query) == [Gpu("GPU-a", 81559 * 2**20), Gpu("GPU-b", 143771 * 2**20)]


@pytest.mark.parametrize("program", ["raise SystemExit(9)", "print('No devices were found')"])
def test_else_the_drivers_files_are_read(tmp_path: Path, program: str) -> None:
    query = (sys.executable, "-c", program)
    assert find_gpus(tmp_path, query) == []
    for bus, uuid in (("0000:1b:00.0", "GPU-b"), ("0000:0a:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nIRQ:  9\n"
        )
    assert find_gpus(tmp_path, query) == [Gpu("GPU-a", None), Gpu("GPU-b", None)]
    assert find_gpus(tmp_path, ("/does/not/exist",)) == [Gpu("GPU-a", None), Gpu("GPU-b", None)]


def test_what_torch_was_built_for_is_known_without_it() -> None:
    assert torch_uses_cuda() == (torch.version.cuda is not None)


def test_a_torch_without_cuda_sees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_gpus", lambda: FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setattr(devices, "torch_uses_cuda", lambda: False)
    assert visible_devices() == []
    monkeypatch.setattr(devices, "torch_uses_cuda", lambda: True)
    assert visible_devices() == FOUR[1:3]


def test_a_device_of_unknown_size_is_taken_to_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_gpus", lambda: FOUR)
    monkeypatch.setattr(engines, "visible_devices", lambda: [Gpu("MIG-1", None), Gpu("GPU-e", 5)])
    assert engines.this_machine().device_bytes == (80 * 2**30, 5)
    monkeypatch.setattr(engines, "find_gpus", list)
    assert engines.this_machine().device_bytes == (2**63, 5)


@pytest.mark.gpu
def test_torch_counts_as_many() -> None:
    assert len(visible_devices()) == torch.cuda.device_count()
