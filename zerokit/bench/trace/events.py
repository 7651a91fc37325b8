"""The file of a timeline: Trace Event JSON, which Perfetto, Chrome and TensorBoard read.

A process is a rank, and a thread one of its tracks. Spans of one thread must lie in each other or apart, so collectives
that are in flight together have several.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from zerokit.bench.record.measured import Trace
from zerokit.bench.record.record import write_text
from zerokit.bench.trace.spans import GATHERS, OWNERS, REDUCTIONS, STEP, TRACKS, Span
from zerokit.offsets import Offset

FORMAT = "zerokit.timeline/1"
_IN_FLIGHT = (GATHERS, REDUCTIONS, OWNERS)
_MOST_TRACKS = 1000
"""Numbers of a rank's threads; they must differ between processes."""


@dataclass(frozen=True, slots=True)
class RankSpans:
    """What took place on one rank, by its own clock."""

    rank: int
    host: str
    device: str
    offset: Offset
    spans: Sequence[Span]


def trace(ranks: Sequence[RankSpans], about: dict[str, Any]) -> dict[str, Any]:
    """The content of the file, with all ranks on rank 0's clock; the first span begins at 0."""
    zero = min((s.start - one.offset.seconds for one in ranks for s in one.spans), default=0.0)
    events = [event for one in ranks for event in _events(one, zero)]
    clocks = [
        {
            "rank": one.rank,
            "host": one.host,
            "offset_ms": one.offset.seconds * 1e3,
            "uncertainty_ms": one.offset.uncertainty_s * 1e3,
        }
        for one in ranks
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, **about, "clocks": clocks},
    }


def write_trace(content: dict[str, Any], path: Path) -> Trace:
    """Write the file as it is, and say what it holds."""
    steps: dict[int, float] = {}
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    for event in spans:
        if event["cat"] == STEP:
            steps[event["pid"]] = steps.get(event["pid"], 0.0) + event["dur"] / 1e3
    uncertainty = max(clock["uncertainty_ms"] for clock in content["otherData"]["clocks"])
    write_text(to_json(content), path)
    return Trace(path.name, max(steps.values()), len(spans), uncertainty)


def to_json(content: dict[str, Any]) -> str:
    """One event a line."""
    rest = {key: value for key, value in content.items() if key != "traceEvents"}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in content["traceEvents"])
    return f'{{"traceEvents":[\n{lines}\n],{json.dumps(rest, allow_nan=False)[1:]}\n'


def _events(one: RankSpans, zero: float) -> Iterator[dict[str, Any]]:
    process = one.rank + 1  # 0 is the idle process
    yield _named("process_name", process, 0, name=f"rank {one.rank} ({one.host})")
    yield _named("process_labels", process, 0, labels=one.device)
    yield _named("process_sort_index", process, 0, sort_index=one.rank)
    for number, (name, spans) in enumerate(_threads(one.spans), process * _MOST_TRACKS):
        yield _named("thread_name", process, number, name=name)
        yield _named("thread_sort_index", process, number, sort_index=number)
        # Who contains others comes first.
        for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
            start, stop = (
                round((moment - one.offset.seconds - zero) * 1e6, 3) for moment in (span.start, span.stop)
            )
            yield {
                "ph": "X",
                "pid": process,
                "tid": number,
                "ts": start,
                "dur": round(stop - start, 3),
                "cat": span.track,
                "name": span.name,
                "args": {"rank": one.rank, **span.about},
            }


def _named(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}


def _threads(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """The threads in order, with their spans."""

    def place(span: Span) -> tuple[int, str]:
        return TRACKS.index(span.track), str(span.about.get("axis", ""))

    for (track, axis), group in groupby(sorted(spans, key=place), key=place):
        name = f"{TRACKS[track]} ({axis})" if axis else TRACKS[track]
        own = list(group)
        lanes = _apart(own) if TRACKS[track] in _IN_FLIGHT else [own]
        for number, lane in enumerate(lanes, 1):
            yield name if number == 1 else f"{name} {number}", lane


def _apart(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few lanes as hold them without overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].stop <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes
