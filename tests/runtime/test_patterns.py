"""Every pattern is, at the stages that it is tried at, what it is declared to be; and the table says so.

`python -m tests.runtime.patterns KEY` tries one alone.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.patterns.catalogue import PATH, PATTERNS, render
from tests.runtime.patterns.engines import Setting
from tests.runtime.patterns.harness import STAGES, Pattern, Verdict, usage
from tests.runtime.patterns.running import Job, jobs_of, launches, try_out
from tests.support.distributed import ROOT


def _autocast_forgets() -> bool:
    """Whether autocast casts anew after a forward without gradients; torch 2.6 keeps the copy, which has none."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            weight @ weight
        return (weight @ weight).requires_grad


#: Patterns that plain torch of this release does not train.
BROKEN = [] if _autocast_forgets() else ["loops.autocast_evaluates_first"]
KEYS = [key for key in PATTERNS if key not in BROKEN]
ON_MESH = [(key, setting) for key in KEYS[::8] if (setting := PATTERNS[key].on_mesh()) is not None]
"""Each eighth; `python -m tests.runtime.patterns --mesh` tries all."""
LAUNCHES = launches([*(job for key in KEYS for job in jobs_of(key)), *ON_MESH])
APART = [
    jobs
    for jobs in LAUNCHES
    if PATTERNS[jobs[0][0]].apart and jobs[0][1].stage in PATTERNS[jobs[0][0]].refused
]
"""Most of them wait for a time-out: each eighth is in the default tier."""
FULL = [
    jobs for jobs in LAUNCHES if jobs[0][1].outer is not None or (jobs in APART and jobs not in APART[::8])
]


@pytest.mark.parametrize(
    "jobs",
    [pytest.param(jobs, marks=pytest.mark.full if jobs in FULL else ()) for jobs in LAUNCHES],
    ids=lambda jobs: f"{jobs[0][0]}, {jobs[0][1]}",
)
def test_patterns(jobs: list[Job]) -> None:
    found = try_out(jobs)
    assert not found, found


def test_the_table_is_current_and_the_readme_counts_them() -> None:
    assert PATH.read_text() == render(), "run python -m tests.runtime.patterns --write"
    assert f"[{len(PATTERNS)} ways to train](zerokit/runtime/PATTERNS.md)" in (ROOT / "README.md").read_text()
    assert {key for jobs in LAUNCHES for key, _ in jobs} == set(KEYS)


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
