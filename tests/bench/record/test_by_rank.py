"""Settings of unequal ranks: what they may be, and what does not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.bench.records import make_cell
from zerokit.bench.catalogue.engines import cell_label, unsupported
from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.comparison.unequal import by_rank
from zerokit.bench.record.metrics import metrics_of
from zerokit.bench.record.record import Record, Run
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import identity, unusual, varying
from zerokit.bench.run.session import limits_of
from zerokit.errors import UsageError
from zerokit.launch.limits import Limit

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shares": "3"}, "1 shares, expected one for each of 2 ranks"),
    ({"shares": "3;1"}, "expected whole numbers by rank, such as 3,1, or memory"),
    ({"shares": "1.5,1"}, "expected whole numbers by rank"),
    ({"shares": "0,0"}, "expected integers from 0 to 1048576, not all of them 0"),
    ({"shares": "-1,1"}, "expected integers from 0 to 1048576"),
    ({"shares": "2,1", "every": 4}, "islands hold equal parts"),
    ({"shares": "2,1", "elastic": True, "save": "run"}, "an elastic bench changes the number of ranks"),
    ({"pace": True, "elastic": True, "save": "run"}, "an elastic bench changes the number of ranks"),
    ({"pace": True, "nodes": 1}, "--pace deals samples to several ranks: give at least 2"),
    ({"pace": True, "every": 4}, "islands take the mean of their weights"),
    ({"pace": True, "warmup": 19}, "give at least 20, or leave --warmup out"),
    ({"cores_per_rank": "1"}, "1 values, expected one for each of 2 ranks"),
    ({"cores_per_rank": "1,0"}, "expected numbers by rank from 0.05 on, such as 1,0.5"),
    ({"cores_per_rank": "nan,1"}, "expected numbers by rank from 0.05 on"),
    ({"memory_per_rank": "1G,some"}, "expected sizes by rank, such as 2G,512M"),
    ({"memory_per_rank": "1G,1"}, "and each at least 1M"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(**{"nodes": 2, **options})
    assert message in str(caught.value)


def test_shares_may_be_those_of_the_inner_axis_and_limits_have_units() -> None:
    Settings(nodes=2, nproc_per_node=2, mesh="2x2", shares="3,1")
    settings = Settings(nodes=2, cores_per_rank="1,0.5", memory_per_rank="1.5GiB,512M")
    assert limits_of(settings) == [Limit(1.0, 3 * 2**29), Limit(0.5, 2**29)]
    assert limits_of(Settings(nodes=2, cores_per_rank="1,0.5")) == [Limit(1.0), Limit(0.5)]
    assert limits_of(Settings(nodes=2)) == []


def test_they_belong_to_a_cell_and_are_said_of_it() -> None:
    cells = [Settings(nodes=2), Settings(nodes=2, shares="3,1"), Settings(nodes=2, shares="3,1", pace=True)]
    assert varying(cells) == ["shares", "pace"]
    assert len({tuple(identity(one).items()) for one in cells}) == 3
    assert cell_label(cells[2], ["shares", "pace"]) == "zerokit 2 · shares 3,1 · by pace"
    assert cell_label(cells[0], ["shares", "pace"]) == "zerokit 2 · no pace"
    assert unusual(Settings(nodes=2, cores_per_rank="1,0.5", pace=True))[-2:] == ["by pace", "cores 1,0.5"]


def test_engines_and_models_that_cannot_say_why() -> None:
    shares = Settings(engine="ddp", stage=0, nodes=2, shares="3,1")
    assert unsupported(shares) == "ddp cuts equally for all ranks: --shares 3,1 is zerokit's"
    paced = Settings(engine="fsdp2", stage=3, nodes=2, pace=True)
    assert unsupported(paced) == "fsdp2 takes the mean of ranks with equal batches: --pace is zerokit's"
    normalised = unsupported(Settings(model="resnet50", nodes=2, pace=True)) or ""
    assert normalised.startswith("resnet50 normalises over its micro-batch")
    assert unsupported(Settings(nodes=2, shares="memory", pace=True)) is None


def unequal() -> Record:
    record = make_cell()
    record = replace(record, settings=replace(record.settings, shares="3,1", pace=True, warmup=20))
    one, two = record.ranks
    idle = [
        replace(one, computed_ms=60.0, waited_ms=40.0, share=3, samples=6, speed=1.5),
        replace(two, computed_ms=99.0, waited_ms=1.0, share=1, samples=2, speed=0.5),
    ]
    return replace(record, ranks=idle)


def test_idle_time_and_parts_by_rank() -> None:
    record = Record.from_json(unequal().to_json())
    found = metrics_of(record)
    assert (found["idle/least"], found["idle/most"]) == (0.01, 0.4)
    assert "step/paced" not in found  # its twin's passes are of other batches than an equal cell's
    assert "idle/most" not in metrics_of(make_cell("ddp", 0))
    parts = by_rank(record)
    assert list(parts.values())[:3] == ["6, 2", "1.5, 0.5", "3, 1"]
    assert by_rank(make_cell()) == {}
    (_, paced) = make_cells([Run("a", (make_cell(),)), Run("b", (record,))])
    assert "by pace" in paced.label
    assert "shares 3,1" in paced.label
