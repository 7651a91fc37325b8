"""The management library, made up: only the devices that a node's ranks use are looked at."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zerokit.bench.machine.accelerator import Accelerator, device_id
from zerokit.bench.machine.devices import identify
from zerokit.bench.machine.nvml import Devices
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.worker.rank import node_sampler

ON_CUDA = Accelerator(torch.device("cuda", 1), "nccl")


class NVMLError(Exception):
    pass


@dataclass
class Library:
    """`pynvml` with devices in the driver's order; a slice tells its memory and no utilisation."""

    uuids: tuple[str, ...] = ("GPU-a", "GPU-b", "GPU-c", "MIG-d")
    started: bool = False
    NVMLError: type[Exception] = NVMLError
    asked: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self.uuids):
            raise NVMLError("Not Found")
        return index

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

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise NVMLError("Not Supported")


def read(library: Library, *identities: str) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    Devices(library, identities).read(row)
    return row


def test_only_the_devices_that_were_named_are_asked_in_their_order() -> None:
    library = Library()
    row = read(library, "GPU-c", "0")
    assert library.asked == ["GPU-c", "GPU-a"]
    assert row == {
        "gpu_0_utilization_percentage": 20.0,
        "gpu_0_memory_usage_megabytes": 3000.0,
        "gpu_0_memory_usage_percentage": 30.0,
        "gpu_1_utilization_percentage": 0.0,
        "gpu_1_memory_usage_megabytes": 1000.0,
        "gpu_1_memory_usage_percentage": 10.0,
    }


@pytest.mark.parametrize("identity", ["MIG-d", "GPU-d"])  # torch tells a UUID, not what it is of
def test_a_slice_tells_what_it_can(identity: str) -> None:
    assert read(Library(), identity) == {
        "gpu_0_memory_usage_megabytes": 4000.0,
        "gpu_0_memory_usage_percentage": 40.0,
    }


def test_what_the_library_does_not_know_is_left_out() -> None:
    assert set(read(Library(), "GPU-x", "9", "GPU-b")) == {
        "gpu_2_utilization_percentage",
        "gpu_2_memory_usage_megabytes",
        "gpu_2_memory_usage_percentage",
    }


def test_a_sampler_asks_for_its_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    one = Sampler(interval_s=3600.0, devices=["GPU-b"])
    one.start()
    samples = one.stop()
    assert samples.series["gpu_0_utilization_percentage"][0] == 10.0
    assert {name for name in samples.series if name.startswith("gpu_")} == {
        "gpu_0_utilization_percentage",
        "gpu_0_memory_usage_megabytes",
        "gpu_0_memory_usage_percentage",
    }


def test_without_devices_the_library_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert Devices.find(()) is None
    assert not library.started


@pytest.mark.parametrize(
    ("listed", "index", "uuid", "expected"),
    [
        (None, 1, "b-2", "GPU-b-2"),
        ("3,5", 1, "b-2", "GPU-b-2"),  # CUDA's order need not be the driver's
        ("3,5", 1, None, "5"),
        (None, 1, None, "1"),
        ("GPU-b", 0, "b-2", "GPU-b-2"),  # cut short
        ("GPU-b-2", 0, None, "GPU-b-2"),
        ("MIG-s-1", 0, "b-2", "MIG-s-1"),
        ("7", 0, "GPU-b-2", "GPU-b-2"),
    ],
)
def test_a_device_is_called_by_its_uuid(
    listed: str | None, index: int, uuid: str | None, expected: str
) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert identify(index, uuid, environment) == expected


def test_a_rank_knows_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert device_id(Accelerator(torch.device("cpu"), "gloo")) is None
    properties = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_id(ON_CUDA) == "6"
    properties.uuid = "12ab-34"
    assert device_id(ON_CUDA) == "GPU-12ab-34"


def node_of() -> tuple[str, ...] | None:
    """On a rank of 2 nodes: the devices that it samples. Ranks 0 and 1 share one, each of ranks 2 and 3 has its own."""
    rank = dist.get_rank()
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    identity = ("GPU-a", "GPU-a", "GPU-c", "GPU-b")[rank]
    with patch("zerokit.bench.worker.rank.device_id", return_value=identity):
        sampler = node_sampler(ON_CUDA)
    return None if sampler is None else sampler.devices


def test_one_rank_of_a_node_samples_the_devices_of_all_its_ranks() -> None:
    assert run_ranks(4, node_of) == [("GPU-a",), None, ("GPU-c", "GPU-b"), None]


@pytest.mark.gpu
def test_the_library_knows_torchs_device() -> None:
    pytest.importorskip("pynvml")
    identity = device_id(Accelerator(torch.device("cuda", 0), "nccl"))
    assert identity is not None
    devices = Devices.find([identity])
    assert devices is not None
    row: dict[str, float | None] = {}
    devices.read(row)
    assert row["gpu_0_memory_usage_megabytes"]
