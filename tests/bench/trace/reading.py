"""What must hold of every trace: its form, and what a step of zerokit consists of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from zerokit.placement import Mesh

TOLERANCE_US = 200.0
ROUNDING_US = 0.002
IN_FLIGHT = {"gathers", "reductions", "to and from owners"}

Event = dict[str, Any]


def spans_of(content: dict[str, Any], rank: int | None = None) -> list[Event]:
    """The spans, of one rank or of all."""
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    return [one for one in spans if rank is None or one["args"]["rank"] == rank]


def require_form(content: dict[str, Any], world: int) -> None:
    """The format's rules, and that spans of a thread lie in each other or apart."""
    assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] == "ms"
    names: dict[str, dict[tuple[int, int], Any]] = defaultdict(dict)
    for event in content["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["pid"] > 0
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            names[event["name"]][event["pid"], event["tid"]] = next(iter(event["args"].values()))
        else:
            assert event["ts"] >= 0 <= event["dur"]
            assert event["args"]["rank"] == event["pid"] - 1
    assert len(names["process_name"]) == len(set(names["process_name"].values())) == world
    assert sorted(names["process_sort_index"].values()) == list(range(world))
    threads = defaultdict(list)
    for span in spans_of(content):
        threads[span["pid"], span["tid"]].append(span)
    assert threads.keys() == names["thread_name"].keys() == names["thread_sort_index"].keys()
    assert len({tid for _, tid in threads}) == len(threads), "Perfetto wants numbers of threads to differ"
    for spans in threads.values():
        _require_nested(spans)
    assert min(span["ts"] for span in spans_of(content)) == 0


def _require_nested(spans: Sequence[Event]) -> None:
    ends: list[float] = []
    before = 0.0
    for span in spans:
        assert span["ts"] >= before, "in order"
        before, end = span["ts"], span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"] + ROUNDING_US:
            ends.pop()
        assert not ends or end <= ends[-1] + ROUNDING_US, f"{span} is partly in another span"
        ends.append(end)


def require_traffic(content: dict[str, Any], world: int) -> None:
    """On every rank each collective once, with the bytes and calls of the traffic report."""
    traffic = content["otherData"]["traffic"]
    for rank in range(world):
        moved, calls = Counter[str](), Counter[str]()
        for span in spans_of(content, rank):
            if span["cat"] in IN_FLIGHT:
                assert span["args"]["bytes"] == sum(span["args"]["operations"].values())
                moved.update(span["args"]["operations"])
                calls.update(span["args"]["operations"].keys())
        assert moved == {name: one["bytes"] for name, one in traffic.items()}
        assert calls == {name: one["calls"] for name, one in traffic.items()}


def require_overlap(content: dict[str, Any], mesh: Mesh) -> int:
    """A collective is under way on all its ranks at some moment; returns how many were looked at."""
    by_rank: list[defaultdict[tuple[str, str, str], list[Event]]] = []
    for rank in range(mesh.world):
        own: defaultdict[tuple[str, str, str], list[Event]] = defaultdict(list)
        for span in sorted(spans_of(content, rank), key=lambda span: float(span["ts"])):
            if span["cat"] in IN_FLIGHT:
                own[span["cat"], span["name"], span["args"].get("axis", "")].append(span)
        by_rank.append(own)
    assert len({frozenset((key, len(some)) for key, some in own.items()) for own in by_rank}) == 1
    looked_at = 0
    for rank, own in enumerate(by_rank):
        for key, some in own.items():
            axes = [axis for axis in mesh.axes if axis.name.lower() == key[2]] or list(mesh.axes)
            members = mesh.members(axes[0], rank) if len(axes) == 1 else range(mesh.world)
            for number in range(len(some)):
                same = [by_rank[member][key][number] for member in members]
                last_start = max(span["ts"] for span in same)
                first_end = min(span["ts"] + span["dur"] for span in same)
                assert last_start <= first_end + TOLERANCE_US, (rank, key, number)
                looked_at += 1
    return looked_at
