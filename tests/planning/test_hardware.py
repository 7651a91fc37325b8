"""Devices, cluster files and the doctor's output: what is read, and what a wrong or missing part says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_timeline import FAST, SIZES, plan_of
from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.planning.cluster_files import read_cluster
from zerokit.planning.efficiency import SHARES, Efficiency, of_device
from zerokit.planning.hardware import (
    DEVICES,
    Cluster,
    Device,
    Link,
    Reading,
    Sharing,
    device_named,
)
from zerokit.planning.measured import beside, measured_efficiency, measured_step
from zerokit.planning.timeline import step_time
from zerokit.planning.work import Product, Work

DOCTOR = {
    "facts": {
        "group": {
            "routes": ["sockets", "sockets", "sockets", "sockets"],
            "axes": [
                {"axis": "inner", "ranks": 2, "latency_s": 1e-4, "gb_per_s": 1.5, "slowdown": 0.4},
                {"axis": "outer", "ranks": 2, "latency_s": 3e-4, "gb_per_s": 0.05, "slowdown": 0.1},
            ],
            "paces": {
                "threads": 1,
                "alone": {"gflops": 40.0, "block_ms": 20.0, "gb_per_s": 30.0, "page_s": 2e-6},
                "together": {"gflops": 39.0, "block_ms": 22.0, "gb_per_s": 15.0, "page_s": 3e-6},
            },
        }
    }
}


def test_devices_are_found_by_their_name_and_by_torchs() -> None:
    assert device_named("h100-80") is device_named("NVIDIA H100 80GB HBM3")
    assert device_named("NVIDIA A100-SXM4-40GB").name == "a100-40"
    assert all(device_named(name).name == name for name in DEVICES)
    for name in ("h900", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(UsageError, match=r"unknown: choose one of a100-40.*--cluster.*--from"):
            device_named(name)


def test_a_device_that_nothing_was_measured_on_is_no_guess() -> None:
    with pytest.raises(UsageError, match="nothing has been measured on device 'l40s': give a record"):
        of_device(DEVICES["l40s"], "bf16")
    with pytest.raises(UsageError, match="no peak for fp8"):
        of_device(DEVICES["h100-80"], "fp8")
    peak = DEVICES["l40s"].flops["bf16"]
    assert 0 < of_device(DEVICES["l40s"], "bf16", SHARES["h100-80"]).flops < peak  # a record scales it


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'device = "h100-80"\ngpus_per_node = 8\n[outer]\ngbit_per_s = 1600\nlatency_us = 20\n[inner]\ngb_per_s = 300\n'
    )
    cluster = read_cluster(path)
    assert (cluster.device.name, cluster.ranks_per_node) == ("h100-80", 8)
    inner, outer = cluster.link(inside=True), cluster.link(inside=False)
    assert inner.bytes_per_s == 300e9
    assert outer.latency_s == pytest.approx(20e-6)
    assert 0.7 * 200e9 < outer.bytes_per_s < 200e9
    path.write_text(json.dumps({"gpus_per_node": 4, "device": {"tflops": {"bf16": 100}, "memory_gb": 24}}))
    with pytest.raises(UsageError, match=r"cluster.toml: \[device\] needs memory_gb_per_s, a number above 0"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus_per_node = 8", "no device"),
        ('device = "h100-80"', "gpus_per_node is None"),
        ('device = "h100-80"\ngpus_per_node = 8\n[outer]\nspeed = 3', r"'speed' in \[outer\] is unknown"),
        ('device = "h100-80"\ngpus_per_node = 8\n[outer]\nlatency_us = 3', r"\[outer\] needs gbit_per_s"),
        ('device = "h100-80"\ngpus_per_node = 8\n[inner]\ngb_per_s = inf', r"\[inner\] needs gb_per_s"),
        ("gpus_per_node = 8\n[device]\ntflops = { bf17 = 1 }", r"'bf17' in \[device.tflops\] is unknown"),
        ('device = "h100-80"\ngpus_per_node = 8\n[middle]', "'middle' is unknown"),
        ('device = "h100-80"\ngpus_per_node = 8\ninner = 3', r"\[inner\] needs gb_per_s"),
        ("{", "not a cluster file"),
        ('{"facts": {"group": null}}', "the doctor measured no link"),
        (
            '{"facts": {"group": {"axes": [{"axis": "inner"}]}}}',
            "not what `zerokit doctor --json` of this version",
        ),
    ],
)
def test_what_is_wrong_in_a_cluster_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_cluster(path)


def test_a_missing_axis_says_what_to_give() -> None:
    device = DEVICES["h100-80"]
    step = plan_of(2, Mesh(1, 16))
    with pytest.raises(UsageError, match=r"between nodes: give \[outer\] with gbit_per_s"):
        step_time(step, Cluster(device, 8, device.inner), FAST)
    with pytest.raises(UsageError, match=r"ranks of a node: give \[inner\] with gb_per_s"):
        step_time(step, Cluster(Device("x"), 16), FAST)


def test_the_doctors_output_is_a_cluster_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(DOCTOR))
    cluster = read_cluster(path)
    assert cluster.ranks_per_node == 2
    outer = cluster.link(inside=False)
    assert (outer.bytes_per_s, outer.latency_s, outer.relays) == (0.05e9 * 2, 3e-4, False)
    assert outer.share == 0.1
    assert cluster.link(inside=True).reading is None
    assert cluster.sharing == Sharing(1, 40e9, 22 / 20, 2.0, 3e-6)
    with pytest.raises(UsageError, match="computed on hosts, and h100-80 is planned"):
        read_cluster(path, device=DEVICES["h100-80"])
    doctor = copy.deepcopy(DOCTOR)
    group: Any = doctor["facts"]["group"]
    speeds = {"gather_gb_per_s": 8.0, "fresh_gb_per_s": 6.0, "reduce_gb_per_s": 4.0}
    group["axes"][0]["units"] = {"latency_s": 2e-4, **speeds}
    path.write_text(json.dumps(doctor))
    inner = read_cluster(path).link(inside=True)
    assert (inner.latency_s, inner.reading) == (2e-4, Reading(8e9, 6e9, 4e9))
    del group["paces"]
    path.write_text(json.dumps(doctor))
    with pytest.raises(UsageError, match="did not see how fast ranks compute together: run it anew"):
        read_cluster(path)


def test_ranks_of_a_host_share_it() -> None:
    plan, link = plan_of(3, Mesh(1, 2)), Link(0.0, 1e9, relays=False, reading=Reading(8e9, 6e9, 4e9))
    alone = Efficiency(40e9, (40e9, 40e9), 30e9, 4)
    shared = beside(alone, Sharing(1, 40e9, 1.1, 2.0, 3e-6))
    free, slowed = (step_time(plan, Cluster(Device("cpu"), 2, link), each) for each in (alone, shared))
    assert slowed.optimizer_s == pytest.approx(2 * free.optimizer_s)
    whole = sum(unit.numel for unit in plan.layout.units)
    # Gradients, in fresh pages.
    pages = whole * SIZES.compute / 4096
    fresh = (slowed.compute_s - 1.1 * free.compute_s) / 3e-6
    # Buckets fill 2.0 and not 1.1 times as slowly.
    moved = 0.9 * whole * (SIZES.compute + SIZES.reduce) / 30e9 / 3e-6
    assert fresh == pytest.approx(pages + moved, rel=0.01)
    assert slowed.exposed_total_s == free.exposed_total_s  # small units pass their pages on


ALONE = {"nodes": 1, "nproc_per_node": 1, "engine": "zerokit", "stage": 2}


def record(**changes: object) -> dict[str, object]:
    return {
        "status": "ok",
        "settings": ALONE,
        "environment": {"threads": 1, "accelerator": None},
        "phases": {"forward_ms": 30.0, "backward_ms": 60.0, "optimizer_ms": 10.0},
        "ranks": [{"step_ms": [90.0, 100.0, 2000.0]}],
        **changes,
    }


def test_a_plan_from_a_record_takes_as_long_as_was_measured() -> None:
    measured = measured_step(record())
    assert measured.passes_s == pytest.approx(0.09)
    plan = plan_of(2, Mesh(1, 1))
    efficiency = measured_efficiency(measured, plan, "fp32")
    step = step_time(plan, Cluster(Device("cpu"), 1), efficiency)
    assert step.total_s == pytest.approx(0.1)
    assert step.optimizer_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "out of memory"}, "ended out of memory"),
        (
            {"settings": ALONE | {"nproc_per_node": 4, "engine": "ddp"}},
            "4 ranks that communicate: give one of",
        ),
        ({"phases": None}, "no phases"),
        ({"settings": ALONE | {"stage": 3}}, "of stage 3, which on hosts hands memory back"),
    ],
)
def test_a_record_that_cannot_serve_says_which_can(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        measured_step(record(**changes))


def test_small_products_are_slower_and_launching_may_be_the_limit() -> None:
    large, small = Product(4096, 4096, 4096), Product(4096, 32, 32)
    speeds = [product.flops / FAST.seconds(Work((product,))) for product in (large, small)]
    assert speeds[0] > 5 * speeds[1]
    hosted = Efficiency(1e15, (1e15, 1e15), 1e12, 2, launch_s=1e-5)
    assert hosted.seconds(Work((small,), 0, 100)) == pytest.approx(1e-3)
    assert hosted.limit([Work((small,), 0, 100)]) == "host"
    assert hosted.limit([Work((large,) * 50, 0, 1)]) == "compute"
    assert hosted.limit([Work((), 10**12, 1)]) == "memory"
