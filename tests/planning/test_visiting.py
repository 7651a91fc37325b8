"""Steps whose masters and states visit: closed forms of the update, what is chosen, and what is said of it."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.bench.records import make_record
from tests.cli.inside import zerokit_inside
from tests.planning.test_cells import ask
from tests.planning.test_timeline import FAST, SIZES, plan_of
from zerokit.bench.plans.subjects import speed_of
from zerokit.bench.record.measured import Phases
from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.planning.cluster_files import read_cluster
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import DEVICES, Cluster, Device, Link, Way
from zerokit.planning.timeline import Plan, StepTime, step_time, update_bytes

UNITS, NUMEL = 5, 1_048_576
AWAY = 12 * NUMEL
"""Bytes of a unit's masters and states on one rank."""


def step(
    home: str, way: Way | None = None, efficiency: Efficiency = FAST, mesh: Mesh | None = None, **sizes: Any
) -> StepTime:
    mesh = mesh or Mesh(1, 1)
    plan: Plan = plan_of(2, mesh)
    plan = replace(plan, sizes=replace(SIZES, home=home, **sizes))
    ways = {"host": way if home == "host" else None, "disk": way if home == "disk" else None}
    return step_time(
        plan,
        Cluster(Device("test"), mesh.world, Link(0.0, 1e18), host=ways["host"], disk=ways["disk"]),
        efficiency,
    )


def test_a_slow_disk_moves_every_byte_twice() -> None:
    time = step("disk", Way(2e6, 3e6, in_turn=True))
    assert time.visits_s == pytest.approx(UNITS * AWAY * (1 / 2e6 + 1 / 3e6), rel=1e-3)
    assert time.total_s == pytest.approx(time.compute_s + time.optimizer_s + time.visits_s)
    assert time.limit == "states"


def test_a_slow_host_moves_both_ways_at_once() -> None:
    """Five units come one behind the other; the last one leaves behind that."""
    time = step("host", Way(2e6, 2e6))
    assert time.visits_s == pytest.approx((UNITS + 1) * AWAY / 2e6, rel=1e-3)
    # Units cannot come into buffers that others have not left.
    time = step("host", Way(4e6, 1e6))
    assert time.visits_s == pytest.approx(AWAY / 4e6 + UNITS * AWAY / 1e6, rel=1e-3)


def test_a_fast_way_hides_all_but_the_ends() -> None:
    slow = replace(FAST, memory_bytes_per_s=1e9)
    time = step("host", Way(1e12, 1e12), slow)
    assert time.visits_s == pytest.approx(2 * AWAY / 1e12)
    device = step("device", None, slow)
    assert device.visits_s == 0
    assert time.optimizer_s == pytest.approx(device.optimizer_s)


def test_ranks_of_a_node_share_its_disk_and_their_states() -> None:
    way = Way(2e6, 3e6, in_turn=True)
    assert step("disk", way, mesh=Mesh(1, 4)).visits_s == pytest.approx(step("disk", way).visits_s, rel=0.01)
    assert step("host", way, mesh=Mesh(1, 4)).visits_s == pytest.approx(
        step("host", way).visits_s / 4, rel=0.01
    )


def test_fp8_decodes_and_encodes() -> None:
    """Two moments of four bytes: each is read and written in one byte, and written and read in four."""
    coded = replace(SIZES, home="fp8", moments=(4, 4))
    assert update_bytes(coded) - update_bytes(SIZES) == 2 * 2 * (1 + 4)
    assert step("fp8", moments=(4, 4)).visits_s == 0


def test_events_show_who_comes_and_leaves() -> None:
    lanes = [event for event in step("disk", Way(1e9, 1e9, in_turn=True)).events if event.lane == "disk"]
    assert [event.name for event in lanes] == [
        "come 0",
        "come 1",
        "leave 0",
        "come 2",
        "leave 1",
        "come 3",
        "leave 2",
        "come 4",
        "leave 3",
        "leave 4",
    ]
    assert all(one.stop_s <= other.start_s + 1e-12 for one, other in pairwise(lanes))


# ---- choice

DEVICE = 'device = "h100-80"\ngpus_per_node = 8\n'
SMALL = (
    "gpus_per_node = 8\n[device]\ntflops = {{ bf16 = 100 }}\nmemory_gb = {}\nmemory_gb_per_s = 500\n"
    "[inner]\ngb_per_s = 20\n"
)


def planned(tmp_path: Path, text: str, model: str = "gpt-5m", **more: Any) -> Any:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    options: dict[str, Any] = {"gpus": 1, "device": None, "seq_len": 64, "batch_size": 1, "recompute": True}
    return ask(model, **options | {"cluster": file} | more)


def test_states_leave_the_device_only_where_nothing_else_fits(tmp_path: Path) -> None:
    """gpt-5m in bf16 takes 18 bytes a parameter, 6 of them with states elsewhere."""
    roomy = planned(tmp_path, SMALL.format(1))
    assert {one.cell.states for one in (*roomy.fitting, *roomy.too_large)} == {"device"}
    assert roomy.visits is None
    held = roomy.best.memory
    between = (held.needed - held.held.optimizer / 2) / 1e9
    tight = planned(tmp_path, SMALL.format(between), stage=0)
    assert {one.cell.states for one in tight.fitting} == {"host"}
    assert {one.cell.states for one in tight.too_large} == {"device"}
    assert (
        tight.best.memory.away == 12 * tight.best.memory.held.parameters / 2 + tight.best.memory.away % 1024
    )
    assert tight.optimizer_arguments.endswith(', states="host")')
    assert tight.bench_line.endswith("--states host")
    assert "on the host and visit the device unit by unit" in tight.visits
    assert any(text.startswith("No times with states on the host") for text in tight.assumptions)
    # The host is too small as well.
    full = planned(tmp_path, SMALL.format(between) + "[host]\ngb_per_s = 9\nroom_gb = 0.05\n", stage=0)
    assert {one.cell.states for one in full.fitting} <= {"disk", "fp8"}
    lacks = next(one.lack for one in full.too_large if one.cell.states == "host")
    assert "GiB of states on the host" in lacks


@pytest.mark.parametrize("home", ["device", "host", "disk", "fp8"])
def test_a_home_can_be_asked_for(tmp_path: Path, home: str) -> None:
    found = planned(tmp_path, DEVICE, states=home)
    assert {one.cell.states for one in found.fitting} == {home}
    assert found.best.time.total_s > 0
    assert (found.best.time.visits_s > 0) == (home in ("host", "disk"))
    named = {"device": "", "host": "--states host", "disk": "--states /nvme", "fp8": "--states fp8"}[home]
    assert named in found.bench_line


def test_any_home_is_compared(tmp_path: Path) -> None:
    found = planned(tmp_path, DEVICE, states="any", stage=0)
    assert [one.cell.states for one in found.fitting] == [
        "device",
        "fp8",
        "host",
        "disk",
    ]  # the fastest first
    assert "waits" in found.why or "updates for" in found.why
    memory = {one.cell.states: one.memory for one in found.fitting}
    assert memory["host"].away == memory["disk"].away > 0 == memory["fp8"].away
    assert memory["device"].held.optimizer > memory["fp8"].held.optimizer > memory["host"].held.optimizer == 0


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UsageError, match="states 'attic': expected one of device, host, disk, fp8, any"):
        ask(states="attic")
    with pytest.raises(UsageError, match="where hosts compute: omit --states host"):
        ask("gpt-tiny", device="cpu", gpus=1, seq_len=64, states="host")


def test_ways_come_from_a_file_or_the_doctor(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        DEVICE + "[host]\ngb_per_s = 9\nroom_gb = 100\n[disk]\nread_gb_per_s = 8\nwrite_gb_per_s = 4\n"
    )
    found = read_cluster(file)
    assert found.way("host") == Way(9e9, 9e9, room_bytes=100 * 10**9)
    assert found.way("disk") == Way(1e9, 0.5e9, in_turn=True)  # of eight ranks each
    assert Cluster(DEVICES["h100-80"], 8).way("host") == DEVICES["h100-80"].host
    rates = {"direct": True, "size_bytes": 1, "read_bytes_per_s": 4e9, "write_bytes_per_s": 2e9}
    directories = [{"free_bytes": 50, "rates": rates}, {"free_bytes": 9, "rates": None}]
    axes = [{"axis": "inner", "ranks": 2, "latency_s": 1e-6, "gb_per_s": 100.0}]
    facts: dict[str, Any] = {
        "ranks": [{"directory": one} for one in directories],
        "group": {"axes": axes, "copies": {"both_gb_per_s": 20.0}},
    }
    file.write_text(json.dumps({"facts": facts}))
    measured = read_cluster(file, device=DEVICES["h100-80"])
    assert measured.way("host") == Way(20e9, 20e9)
    assert measured.way("disk") == Way(2e9, 1e9, in_turn=True, room_bytes=50)
    # One device alone has links to nobody, but a disk and a host.
    facts["ranks"], facts["group"]["axes"] = facts["ranks"][:1], []
    file.write_text(json.dumps({"facts": facts}))
    alone = read_cluster(file, device=DEVICES["h100-80"])
    assert (alone.ranks_per_node, alone.way("disk")) == (1, Way(4e9, 2e9, in_turn=True, room_bytes=50))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[host]\nspeed = 3", r"'speed' in \[host\] is unknown: expected gb_per_s, room_gb"),
        ("[disk]\nread_gb_per_s = 3", r"\[disk\] needs write_gb_per_s, a number above 0"),
        ("[host]\ngb_per_s = 0", r"\[host\] needs gb_per_s, a number above 0"),
    ],
)
def test_what_is_wrong_with_a_way_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(DEVICE + text)
    with pytest.raises(UsageError, match=says):
        read_cluster(file)


def test_a_record_whose_update_waits_for_states_says_no_speed() -> None:
    record = make_record()
    settings = replace(record.settings, nodes=1, states="/nvme")
    phases = Phases(3, 30.0, 60.0, 10.0, None, "clock")
    alone = replace(record, settings=settings, phases=phases, ranks=record.ranks[:1])
    with pytest.raises(UsageError, match=r"includes what --states /nvme costs.*with states on the device"):
        speed_of(alone, Cluster(Device("cpu"), 1), 1)


def test_on_the_command_line(tmp_path: Path) -> None:
    asked = ("plan", "gpt-tiny", "--device", "h100-80", "--gpus", "8", "--nodes", "1", "--batch-size", "2")
    done = zerokit_inside(tmp_path, *asked, "--states", "disk", "--json", "--page", "plan.html")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {one["states"] for one in answer["fitting"]} == {"disk"}
    assert all(one["visits_ms"] > 0 for one in answer["fitting"])
    held = answer["fitting"][0]["memory"]
    assert held["away_bytes"] == held["held_bytes"]["disk"] > 0 == held["held_bytes"]["optimizer"]
    assert "on disk and visit the device unit by unit" in answer["visits"]
    assert answer["visits"] in html.unescape((tmp_path / "plan.html").read_text())
    table = zerokit_inside(tmp_path, *asked, "--states", "any").stdout
    assert {"states", "visits"} <= set(table.split())
    assert zerokit_inside(tmp_path, *asked).stdout.count("visits") == 0
