"""The file of a timeline, from made-up spans; and marks on a made-up device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.clocks import Device, Event
from tests.bench.trace.reading import require_form, spans_of
from zerokit.bench.trace.events import RankSpans, to_json, trace
from zerokit.bench.trace.recorder import Recorder
from zerokit.bench.trace.spans import GATHERS, DeviceMarks, HostMarks, Span
from zerokit.formulas import Operation
from zerokit.offsets import Offset
from zerokit.runtime.collectives import Kind
from zerokit.runtime.collectives.legs import Count
from zerokit.runtime.collectives.route import Work
from zerokit.runtime.collectives.streams import CudaStream, Launch
from zerokit.runtime.collectives.streams import Operation as OnDevice

NO_OFFSET = Offset(0.0, 0.0)
GATHER = {"bytes": 8, "operations": {"all_gather": 8}}


def one_rank(spans: list[Span], rank: int = 0, offset: Offset = NO_OFFSET) -> RankSpans:
    return RankSpans(rank, f"node-{rank}", "cpu", offset, spans)


def test_ranks_stand_on_the_clock_of_the_first() -> None:
    ranks = [
        one_rank([Span("step", "forward", 10.0, 11.0, {})]),
        one_rank([Span("step", "forward", 510.25, 511.5, {})], 1, Offset(500.0, 0.001)),
    ]
    content = trace(ranks, {"model": "m"})
    require_form(content, 2)
    assert [(span["pid"], span["ts"], span["dur"]) for span in spans_of(content)] == [
        (1, 0, 1e6),
        (2, 250e3, 1250e3),
    ]
    assert content["otherData"]["clocks"][1] == {
        "rank": 1,
        "host": "node-1",
        "offset_ms": 500e3,
        "uncertainty_ms": 1.0,
    }
    assert json.loads(to_json(content)) == content


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.5)), min_size=1, max_size=30))
def test_what_is_in_flight_together_has_threads_of_its_own(times: list[tuple[float, float]]) -> None:
    spans = [Span(GATHERS, "gather", start, start + length, GATHER) for start, length in times]
    content = trace([one_rank(spans)], {})
    require_form(content, 1)
    shown = spans_of(content)
    assert len(shown) == len(spans)
    threads: dict[int, list[tuple[float, float]]] = {}
    for span in shown:
        threads.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    most = max(sum(one.start <= moment < one.stop for one in spans) for moment in [s.start for s in spans])
    assert len(threads) <= max(most, 1) + sum(one.start == one.stop for one in spans)
    for own in threads.values():
        assert all(first[1] <= second[0] + 0.002 for first, second in pairwise(sorted(own)))


@dataclass
class Waited(Event):
    """An event that the host can wait for."""

    def synchronize(self) -> None:
        self.device.synchronize()


def device_marks(device: Device) -> DeviceMarks:
    """Marks of a device, whose host's clock says 100 s when nothing has been asked of it."""
    return DeviceMarks(lambda: Waited(device), lambda: 100.0 + device.over_ms / 1000.0)


def test_a_device_tells_its_marks_by_the_hosts_clock() -> None:
    device = Device()
    device.work(2.0)
    marks = device_marks(device)
    assert marks.uncertainty_s == 0.0, "the anchor that the host waited least for"
    first = marks.mark()
    device.work(30.0)
    second = marks.mark()
    device.synchronize()
    assert marks.read(first) == pytest.approx(100.002)
    assert marks.read(second) == pytest.approx(100.032)


class Prompt(CudaStream):
    """A stream of a made-up device, on which work takes its time."""

    def __init__(self) -> None:
        pass

    def join(self) -> None:
        pass

    def launch(self, operation: OnDevice, after: Work | None = None) -> Work:
        operation.run()
        return self

    def wait(self) -> None:
        pass


def test_collectives_of_a_device_last_from_event_to_event_on_their_stream() -> None:
    """The host issues everything at once: spans are those of the device."""
    device = Device()
    marks = device_marks(device)
    recorder = Recorder(["tok", "blocks.0"], HostMarks(), marks, marks)
    early = recorder.flies(Kind.ALL_GATHER, 0, [Count("all_gather", Operation(1, 4, 16), 8)])
    Launch(Prompt(), OnDevice("early", lambda: device.work(1.0))).watched(early)(None)
    with recorder.step():
        recorder.phase("forward")
        device.work(10.0)
        flight = recorder.flies(Kind.ALL_GATHER, 1, [Count("all_gather/inner", Operation(1, 8, 32), 16)])
        work = Launch(Prompt(), OnDevice("gather", lambda: device.work(5.0))).watched(flight)(None)
        recorder.around(work.wait)
        device.work(2.0)
        recorder.phase("optimizer")
        recorder.update()
        device.work(3.0)
        recorder.taken()
        after = recorder.flies(Kind.ALL_GATHER, 0, [Count("all_gather", Operation(1, 4, 16), 8)])
        Launch(Prompt(), OnDevice("next step's", lambda: device.work(1.0))).watched(after)(None)
    device.synchronize()
    shown = {
        span.name: (round(span.start - 100.0, 6), round(span.stop - 100.0, 6)) for span in recorder.spans()
    }
    assert shown == {
        "gather tok": (0.0, 0.001),
        "forward": (0.001, 0.018),
        "gather blocks.0": (0.011, 0.016),
        "wait of the device": (0.016, 0.016),
        "optimizer": (0.018, 0.022),
        "update": (0.018, 0.021),
    }
    (gather,) = (span for span in recorder.spans() if span.name == "gather blocks.0")
    assert gather.about == {
        "unit": 1,
        "bytes": 32,
        "operations": {"all_gather/inner": 32},
        "received_bytes": 16,
        "axis": "inner",
    }


def test_a_collective_that_nobody_waited_for_lasts_to_the_end() -> None:
    recorder = Recorder(["tok"], HostMarks(), HostMarks(), HostMarks())
    with recorder.step():
        recorder.flies(Kind.ALL_GATHER, 0, []).begin()
        recorder.phase("forward")
        recorder.taken()
    gather, forward = sorted(recorder.spans(), key=lambda span: span.track)
    assert gather.stop == forward.stop
