"""The examination: checks this process, starts the ranks, checks the tracking store, and judges all facts.

What ranks saw before a launch failed is judged as well, for that is mostly why it failed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerokit import __version__
from zerokit.bench.record.schema import SchemaError, from_plain, to_plain
from zerokit.doctor.checks import Examined, judge
from zerokit.doctor.facts import GroupFacts, RankFacts, look_around, own_seat
from zerokit.doctor.findings import Finding, Severity, Verdict, fault, finding, ok, skipped
from zerokit.doctor.tracking import Tracking, judge_tracking, look_at_tracking
from zerokit.doctor.worker import Job
from zerokit.documents import parse_json, read_text
from zerokit.errors import ZerokitError
from zerokit.launch.agents import DISK_HAS

if TYPE_CHECKING:
    from zerokit.bench.run.session import Launch

T = TypeVar("T")

FORMAT = "zerokit.doctor/1"
WORKER = "zerokit.doctor.worker"
JOB = "job.json"
FAULTS = 5
"""The exit code of a report with a fault."""
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The request to examine some ranks."""

    nodes: int  # to start ranks on
    nproc_per_node: int  # ranks of each
    directory: Path  # that ranks would write to
    tracking_uri: str  # where runs would go
    pairs: bool = False  # whether to measure all pairs of nodes
    timeout_s: float = 120.0  # for the ranks, from their start to their end

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.nodes * self.nproc_per_node


@dataclass(frozen=True)
class Report:
    """The doctor's findings, and the facts behind them."""

    plan: Plan  # what was to be examined
    quick: bool  # whether no ranks were started
    here: RankFacts  # what the process that started the ranks sees
    ranks: Sequence[RankFacts]  # what ranks saw; of a launch that failed, those that wrote it down
    group: GroupFacts | None  # what they measured together; None if they never did
    tracking: Tracking  # what was seen of the store
    started: Verdict  # whether the ranks started and ended, ZD901
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # when, UTC

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings, in the order of their codes."""
        examined = Examined(self.ranks or [self.here], self.group, self.plan.world)
        findings = judge(examined) + judge_tracking(self.tracking) + [finding("ZD901", self.started)]
        return sorted(findings, key=lambda one: one.code)

    @property
    def exit_code(self) -> int:
        """The exit code: `FAULTS` if there is a fault, else 0."""
        return FAULTS if any(one.severity is Severity.FAULT for one in self.findings) else 0

    def plain(self) -> dict[str, Any]:
        """The report as one JSON document:

        format          "zerokit.doctor/1"
        zerokit         the version
        created         ISO 8601, UTC
        quick           whether no ranks were started
        nodes, nproc_per_node, directory, pairs, timeout_s    what was examined
        exit_code       0, or 5 if there is a fault
        counts          {"ok": …, "skipped": …, "warning": …, "fault": …}
        findings        [{code, severity, check, where, found, meaning, remedy}], by code, all strings; `where`
                        is empty for what is true everywhere
        facts
            here        `facts.RankFacts` of the process that started the ranks
            ranks       the same of each rank
            group       `facts.GroupFacts`, or null
            tracking    `tracking.Tracking`
        """
        plan = {name: getattr(self.plan, name) for name in ("nodes", "nproc_per_node", "pairs", "timeout_s")}
        facts = {name: getattr(self, name) for name in ("here", "ranks", "group", "tracking")}
        return {
            "format": FORMAT,
            "zerokit": __version__,
            "created": self.created,
            "quick": self.quick,
            "directory": str(self.plan.directory),
            **plan,
            "exit_code": self.exit_code,
            "counts": self.counts(),
            "findings": to_plain(self.findings),
            "facts": to_plain(facts),
        }

    def counts(self) -> dict[str, int]:
        """The number of findings by severity."""
        return {str(kind): sum(one.severity is kind for one in self.findings) for kind in Severity}


class TimedOut(ZerokitError):
    """The ranks did not end in time."""


def examine_quickly(plan: Plan) -> Report:
    """Examine this process alone: no ranks are started, and only a few KiB are written."""
    here = look_around(own_seat({}), plan.directory, 0)
    tracking = look_at_tracking(plan.tracking_uri, quick=True)
    return Report(plan, True, here, [], None, tracking, skipped("--quick: none were started"))


def examine(plan: Plan, launch: Launch, phase: Callable[[str], None] = lambda text: None) -> Report:
    """Examine this process, the ranks and the tracking store; `phase` is called with a text for each phase."""
    here = look_around(own_seat({}), plan.directory, 0)
    phase(f"asking {plan.tracking_uri.rpartition('@')[2]}")
    tracking = look_at_tracking(plan.tracking_uri, quick=False)
    phase(f"starting {plan.world} rank{'s' * (plan.world > 1)}")
    work = Path(tempfile.mkdtemp(prefix="zerokit-doctor-"))
    keep = False
    try:
        trouble = _run(plan, work, launch)
        keep = trouble is not None
        # All of what ranks have left, or as far as they came.
        loaded = (_load(RankFacts, work / f"rank-{rank}.json") for rank in range(plan.world))
        ranks = [one for one in loaded if one is not None]
        group = _load(GroupFacts, work / "group.json") if len(ranks) == plan.world else None
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    started = trouble or ok(f"{plan.world} on {plan.nodes} nodes, all met")
    return Report(plan, False, here, ranks, group, tracking, started)


def _run(plan: Plan, work: Path, launch: Launch) -> Verdict | None:
    """Start the ranks and wait; what went wrong, if anything did."""
    job = work / JOB
    request = Job(str(plan.directory.absolute()), uuid.uuid4().hex, plan.pairs, plan.timeout_s)
    job.write_text(json.dumps(to_plain(request)))
    deadline = time.monotonic() + plan.timeout_s

    def poll() -> None:
        if time.monotonic() > deadline:
            raise TimedOut(f"the ranks did not end within {plan.timeout_s:g} s")

    reason = "the ranks ended, but rank 0 left no result"
    try:
        launch(
            WORKER, [str(job)], nodes=plan.nodes, nproc_per_node=plan.nproc_per_node, log_dir=work, poll=poll
        )
    except TimedOut as error:
        return fault(
            f"{error}; last seen {_progress(plan, work)}",
            "A rank hangs, was never started, or cannot reach the others: training would wait in the same way.",
            "look at the faults above, if any, at firewalls between the nodes, and at that node's processes; "
            f"--timeout gives more time; logs: {work}",
        )
    except ZerokitError as error:
        reason = str(error)
    else:
        if (work / "group.json").is_file():
            return None
    lines = reason.strip().splitlines()
    # The end of a rank's stderr follows in lines of their own; often they repeat the first line.
    stderr = [line[4:].strip() for line in lines[1:] if line.startswith("  | ")]
    last = f" ({stderr[-1][:200]})" if stderr and stderr[-1] not in lines[0] else ""
    full = "".join(f"; {line}" for line in lines if line.startswith(DISK_HAS))
    return fault(
        lines[0][:400] + last + full,
        f"Training would fail in the same way. Ranks were last seen {_progress(plan, work)}.",
        f"look at the faults above, if any, and at the logs in {work}",
    )


def _progress(plan: Plan, work: Path) -> str:
    """How far each rank has come, by the files that it leaves; those that the others wait for come first."""
    stages: dict[tuple[int, str], list[str]] = {}
    for rank in range(plan.world):
        try:
            number, stage, host = (work / f"stage-{rank}").read_text().split("\n")
            stages.setdefault((int(number), stage), []).append(f"{rank} on {host}")
        except (OSError, ValueError):
            stages.setdefault((0, "not running"), []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_MOST_NAMED])}"
        + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")
        + f" {stage}"
        for (_, stage), ranks in sorted(stages.items())
    )


def _load(kind: type[T], path: Path) -> T | None:
    try:
        return from_plain(kind, parse_json(read_text(path)))
    except (OSError, ValueError, SchemaError):
        return None
