"""Every pattern is, at the stages that it is tried at, what it is declared to be; and the table says so.

`python -m tests.runtime.patterns KEY` tries one alone.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.patterns.catalogue import PATH, PATTERNS, render
from tests.runtime.patterns.engines import Setting
from tests.runtime.patterns.harness import STAGES, Pattern, Verdict, usage
from tests.runtime.patterns.running import Interrupted, Job, jobs_of, launches, run_jobs, try_out
from tests.support.distributed import ROOT
from tests.support.missing_waits import MUTATIONS
from tests.support.on_ranks import on_ranks


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
ON_DEVICE = launches(
    job
    for key in KEYS[3::8]
    if PATTERNS[key].world == 2 and not PATTERNS[key].apart
    for job in jobs_of(key, on_device=True)
)
"""Each eighth, of those whose ranks stay in step; `python -m tests.runtime.patterns --device-way` tries all."""
TRIED = [job for jobs in ON_DEVICE for job in jobs]
OTHERS = launches(job for key in KEYS for job in jobs_of(key, on_device=True) if job not in TRIED)
FULL = [
    *(jobs for jobs in LAUNCHES if jobs[0][1].outer is not None),
    *(jobs for jobs in APART if jobs not in APART[::8]),
    *OTHERS,
]


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(jobs, marks=pytest.mark.full if jobs in FULL else ())
        for jobs in (*LAUNCHES, *ON_DEVICE, *OTHERS)
    ],
    ids=lambda jobs: f"{jobs[0][0]}, {jobs[0][1]}",
)
def test_patterns(jobs: list[Job]) -> None:
    found = try_out(jobs)
    assert not found, found


def _on_device(key: str, stage: int, optimizer: str = "sgd") -> Job:
    return key, Setting(stage, optimizer=optimizer, way="device")


FOUND_BY = {
    "gathers are not waited for": (_on_device("loops.closure", 3), "nan"),
    "buckets come back too early": (_on_device("loops.closure", 2), "gave back the memory"),
    "sums are added to too early": (_on_device("loops.loss_backward", 1), "instead of"),
    "the gather of sums begins too early": (_on_device("loops.groups", 0), "instead of"),
    "readers are not waited for": (_on_device("loops.steps_twice", 1), "changed what"),
    "shown gradients are not waited for": (_on_device("weights.gathered_mask", 3), "different gradients"),
    "a failed backward leaves reductions behind": (
        _on_device("loops.second_attempt", 3),
        "gave back the memory",
    ),
    "gradients of owners are not waited for": (_on_device("loops.usual", 1, "adafactor"), "is nan"),
    "what owners have updated is not waited for": (_on_device("loops.usual", 3, "adafactor"), "from-owners"),
    "what owners send is dropped too early": (_on_device("loops.usual", 2, "adafactor"), "from-owners"),
}
"""By the wait that is missing: what finds it, and a word of what is said."""


@on_ranks(2, FOUND_BY.items())
def test_a_missing_wait_is_found(case: tuple[str, tuple[Job, str]]) -> None:
    name, (job, word) = case
    assert run_jobs([job]) == "", "not as declared though nothing was changed"
    found = ""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name].apply(patch)
        try:
            found = run_jobs([job])
        except Interrupted as complaints:
            found = str(complaints)
    assert word in found, found


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("weights.grad_none", Setting(3, outer=0)),
        ("autograd.gradient_penalty", Setting(3, way="threads")),
        ("autograd.force_field", Setting(3, way="threads")),
    ],
    ids=str,
)
def test_what_a_setting_of_its_own_has_found(key: str, setting: Setting) -> None:
    """Ranks that update more than their share, and graphs of backward whose nodes come behind those of forward."""
    found = try_out([(key, setting)])
    assert not found, found


def test_every_wait_is_missed_by_a_pattern() -> None:
    assert FOUND_BY.keys() == MUTATIONS.keys()


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
