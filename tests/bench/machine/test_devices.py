"""Devices as CUDA and the management library would show them, on a machine that has none."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zerokit.bench.catalogue import engines
from zerokit.bench.machine import host as devices
from zerokit.bench.machine.accelerator import Accelerator, choose_accelerator, device_id
from zerokit.bench.machine.host import Gpu, find_gpus, identify, torch_uses_cuda, visible, visible_devices
from zerokit.bench.measure.sampler import Sampler, _devices
from zerokit.bench.worker.rank import node_sampler
from zerokit.network import free_port

FOUR = [Gpu(f"GPU-{letter}1-{letter}2", 80 * 2**30) for letter in "abcd"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        (" 3 , 1 ", [3, 1]),
        ("0,7,1", [0]),  # CUDA stops at what it does not know
        ("GPU-c1-c2,GPU-a", [2, 0]),
        ("GPU-", []),  # of four: ambiguous
        ("1,GPU-x", [1]),
        ("MIG-1-2,MIG-3-4", [Gpu("MIG-1-2", None)]),  # of slices CUDA shows one
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(listed: str | None, expected: list[int | Gpu]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible(FOUR, environment) == [FOUR[one] if isinstance(one, int) else one for one in expected]
    assert visible([], environment) == []


def test_nvidia_smi_is_asked_first_and_else_the_drivers_files_are_read(tmp_path: Path) -> None:
    def ask(program: str) -> list[Gpu]:
        return find_gpus(tmp_path, (sys.executable, "-c", program))

    broken = "raise SystemExit(9)", "print('No devices were found')"
    assert [ask(program) for program in broken] == [[], []]
    for bus, uuid in (("0000:1b:00.0", "GPU-b"), ("0000:0a:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nIRQ:  9\n")
    from_files = [Gpu("GPU-a", None), Gpu("GPU-b", None)]
    assert [ask(program) for program in broken] == [from_files] * 2
    assert find_gpus(tmp_path, ("/does/not/exist",)) == from_files
    assert ask("print('GPU-c, 81559\\nGPU-d, 143771')") == [
        Gpu("GPU-c", 81559 * 2**20),
        Gpu("GPU-d", 143771 * 2**20),
    ]


def test_a_torch_without_cuda_sees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_uses_cuda() == (torch.version.cuda is not None)
    monkeypatch.setattr(devices, "find_gpus", lambda: FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    for built, seen in ((False, []), (True, FOUR[1:3])):
        monkeypatch.setattr(devices, "torch_uses_cuda", lambda built=built: built)
        assert visible_devices() == seen


def test_a_device_of_unknown_size_is_taken_to_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "visible_devices", lambda: [Gpu("MIG-1", None), Gpu("GPU-e", 5)])
    for known, size in ((FOUR, 80 * 2**30), ([], 2**63)):
        monkeypatch.setattr(engines, "find_gpus", lambda known=known: known)
        assert engines.this_machine().device_bytes == (size, 5)


@pytest.mark.gpu
def test_torch_counts_as_many() -> None:
    assert len(visible_devices()) == torch.cuda.device_count()


ON_CUDA = Accelerator(torch.device("cuda", 1), "nccl")


class NVMLError(Exception):
    pass


@dataclass
class Library:
    """`pynvml` with some devices; a slice tells its memory and no utilisation."""

    uuids: tuple[str, ...] = ("GPU-a", "GPU-b", "GPU-c", "MIG-d")
    asked: list[str] = field(default_factory=list)
    nvmlInit: Mock = field(default_factory=Mock)
    nvmlDeviceGetPowerUsage: Mock = field(
        default_factory=lambda: Mock(side_effect=NVMLError("Not Supported"))
    )
    NVMLError: type[Exception] = NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self.asked.append(self.uuids[handle])
        if self.uuids[handle].startswith("MIG-"):
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=10 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) * 10**9, total=10 * 10**9)


def test_only_the_devices_that_were_named_are_asked_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice tells what it can (torch calls it by a UUID, not by what it is of); unknown ones are left out."""
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    without = Sampler(interval_s=3600.0)
    without.start()
    without.stop()
    assert not library.nvmlInit.called
    one = Sampler(interval_s=3600.0, devices=["GPU-c", "GPU-a", "GPU-x", "MIG-d", "GPU-d"])
    one.start()
    series = one.stop().series
    assert library.asked[:4] == ["GPU-c", "GPU-a", "MIG-d", "MIG-d"]
    found = {name: values[0] for name, values in series.items() if name.startswith("gpu_")}
    held = [(0, 3000.0), (1, 1000.0), (3, 4000.0), (4, 4000.0)]
    expected = {f"gpu_{n}_memory_usage_megabytes": size for n, size in held}
    expected |= {f"gpu_{n}_memory_usage_percentage": size / 100.0 for n, size in held}
    assert found == expected | {"gpu_0_utilization_percentage": 20.0, "gpu_1_utilization_percentage": 0.0}


@pytest.mark.parametrize(
    ("listed", "uuid", "expected"),
    [(None, "b-2", "GPU-b-2"), ("GPU-b", "GPU-b-2", "GPU-b-2"), ("MIG-s-1", "b-2", "MIG-s-1")],
)
def test_a_device_is_called_by_its_uuid(listed: str | None, uuid: str, expected: str) -> None:
    assert identify(uuid, {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == expected


def node_of(port: int) -> tuple[tuple[str, ...] | None, str]:
    """On a rank of 2 nodes: the devices that it samples, and its backend. Ranks 0 and 1 share one, 2 and 3 do not."""
    rank = dist.get_rank()
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    identity = ("GPU-a", "GPU-a", "GPU-c", "GPU-b")[rank]
    with patch("zerokit.bench.worker.rank.device_id", return_value=identity):
        sampler = node_sampler(ON_CUDA)
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shown = patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1)
    with shown, patch("zerokit.bench.machine.accelerator.device_id", return_value=identity):
        backend = choose_accelerator(None).backend
    return None if sampler is None else tuple(sampler.devices), backend


def test_ranks_of_a_node_share_a_device_or_have_each_its_own() -> None:
    """One of them samples the devices of all; NCCL serves those that see one device each, and not the same."""
    assert run_ranks(4, node_of, free_port()) == [
        (("GPU-a",), "gloo"),
        (None, "gloo"),
        (("GPU-c", "GPU-b"), "nccl"),
        (None, "nccl"),
    ]


@pytest.mark.gpu
def test_the_library_knows_torchs_device() -> None:
    pytest.importorskip("pynvml")
    identity = device_id(Accelerator(torch.device("cuda", 0), "nccl"))
    assert identity is not None
    assert dict(_devices([identity])())["gpu_0_memory_usage_megabytes"]
