"""Every pattern is, at the stages that it is tried at, what it is declared to be; and the table says so.

`python -m tests.runtime.patterns KEY` tries one alone.
"""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from tests.runtime.patterns.catalogue import PATH, PATTERNS, render
from tests.runtime.patterns.engines import Setting
from tests.runtime.patterns.harness import STAGES, Pattern, Verdict, usage
from tests.runtime.patterns.running import complaints, jobs_of, try_out
from tests.support.distributed import ROOT

#: Patterns that share a launch, which costs as much as two runs: few enough that two workers are equally busy.
BATCH = 16


def _kind(pattern: Pattern) -> tuple[object, ...]:
    return (pattern.subject, pattern.world, pattern.apart, pattern.timeout)


def _batches() -> dict[str, list[str]]:
    """Keys by the name of their batch: its subject and first pattern."""
    batches: dict[str, list[str]] = {}
    for _, alike in groupby(sorted(PATTERNS.values(), key=lambda p: str(_kind(p))), key=_kind):
        patterns = list(alike)
        size = 1 if patterns[0].apart else BATCH
        for start in range(0, len(patterns), size):
            batches[patterns[start].key] = [pattern.key for pattern in patterns[start : start + size]]
    return batches


BATCHES = _batches()


def _autocast_forgets() -> bool:
    """Whether autocast casts anew after a forward without gradients; torch 2.6 keeps the copy, which has none."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            weight @ weight
        return (weight @ weight).requires_grad


#: Patterns that plain torch of this release does not train.
BROKEN = [] if _autocast_forgets() else ["loops.autocast_evaluates_first"]


@pytest.mark.parametrize("batch", BATCHES)
def test_patterns(batch: str) -> None:
    found = complaints(try_out([job for key in BATCHES[batch] if key not in BROKEN for job in jobs_of(key)]))
    assert not found, "\n\n".join(found)


ON_MESH = [
    (pattern.key, setting)
    for number, pattern in enumerate(PATTERNS.values())
    if number % 8 == 0 and pattern.key not in BROKEN and (setting := pattern.on_mesh()) is not None
]
"""Each eighth; `python -m tests.runtime.patterns --mesh` tries all."""


@pytest.mark.parametrize("start", range(0, len(ON_MESH), BATCH))
def test_patterns_on_two_axes(start: int) -> None:
    found = complaints(try_out(ON_MESH[start : start + BATCH]))
    assert not found, "\n\n".join(found)


def test_the_table_is_current_and_the_readme_counts_them() -> None:
    assert PATH.read_text() == render(), "run python -m tests.runtime.patterns --write"
    assert f"[{len(PATTERNS)} ways to train](zerokit/runtime/PATTERNS.md)" in (ROOT / "README.md").read_text()
    assert sorted(key for keys in BATCHES.values() for key in keys) == sorted(PATTERNS)


def test_what_is_declared_is_what_is_accepted() -> None:
    pattern, right = PATTERNS["loops.usual"], Verdict("right")
    refused = Verdict("raised", "use optimizer.gathered()", ("UsageError", "ZerokitError", "ValueError"))
    every = [right, Verdict("wrong"), refused, Verdict("raised", "no gathered() here", ("RuntimeError",))]
    refusals = {
        0: usage("gathered()"),
        1: usage("gathered()", everywhere=False),
        2: usage("other words"),
        3: usage("gathered()", or_right=True),
    }
    refusing = Pattern("", "", "", pattern.train, pattern.build, refusals)
    assert [v for v in every if pattern.accepts(Setting(0), [right, v])] == [right]
    accepted = [[v for v in every if refusing.accepts(Setting(stage), [refused, v])] for stage in STAGES]
    assert accepted == [[refused], every, [], [refused]]
    assert [refusing.accepts(Setting(stage), [right, right]) for stage in (0, 3)] == [False, True]
