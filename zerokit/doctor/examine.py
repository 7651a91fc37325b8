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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerokit import __version__
from zerokit.bench.record.schema import SchemaError, from_plain, to_plain
from zerokit.doctor.clock import judge_clocks
from zerokit.doctor.copies import judge_copies
from zerokit.doctor.devices import judge_devices
from zerokit.doctor.directory import judge_directories
from zerokit.doctor.facts import GroupFacts, RankFacts, look_around, own_seat
from zerokit.doctor.findings import CHECKS, Finding, Severity, Verdict, finding, machines
from zerokit.doctor.hosts import judge_hosts
from zerokit.doctor.interfaces import judge_network
from zerokit.doctor.limits import judge_limits
from zerokit.doctor.processor import judge_processors
from zerokit.doctor.software import judge_software
from zerokit.doctor.tracking import Tracking, judge_tracking, look_at_tracking
from zerokit.doctor.wire import judge_all_reduce, judge_pairs
from zerokit.doctor.worker import STAGES, Job
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
    """The request to examine some ranks.

    Attributes:
        nodes: to start ranks on.
        nproc_per_node: ranks of each.
        directory: that ranks would write to.
        tracking_uri: where runs would go.
        pairs: whether to measure all pairs of nodes.
        timeout_s: for the ranks, from their start to their end.
    """

    nodes: int
    nproc_per_node: int
    directory: Path
    tracking_uri: str
    pairs: bool = False
    timeout_s: float = 120.0

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.nodes * self.nproc_per_node


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's findings, and the facts behind them.

    Attributes:
        plan: what was to be examined.
        quick: whether no ranks were started.
        created: when, UTC.
        here: what the process that started the ranks sees.
        ranks: what ranks saw; of a launch that failed, those that wrote it down.
        group: what they measured together; None if they never did.
        tracking: what was seen of the store.
        findings: in the order of their codes.
    """

    plan: Plan
    quick: bool
    created: str
    here: RankFacts
    ranks: Sequence[RankFacts]
    group: GroupFacts | None
    tracking: Tracking
    findings: Sequence[Finding]

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
        examined = {
            name: getattr(self.plan, name) for name in ("nodes", "nproc_per_node", "pairs", "timeout_s")
        }
        facts = {name: getattr(self, name) for name in ("here", "ranks", "group", "tracking")}
        return {
            "format": FORMAT,
            "zerokit": __version__,
            "created": self.created,
            "quick": self.quick,
            "directory": str(self.plan.directory),
            **examined,
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
    findings = judge([here], None, plan.world) + judge_tracking(tracking)
    findings.append(finding("ZD901", Verdict.skipped("--quick: none were started")))
    return Report(plan, True, _now(), here, [], None, tracking, _by_code(findings))


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
        ranks, group = _read(work, plan.world)
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    findings = judge(ranks or [here], group, plan.world) + judge_tracking(tracking)
    findings.append(trouble or finding("ZD901", Verdict.ok(f"{plan.world} on {plan.nodes} nodes, all met")))
    return Report(plan, False, _now(), here, ranks, group, tracking, _by_code(findings))


def judge(ranks: Sequence[RankFacts], group: GroupFacts | None, world: int) -> list[Finding]:
    """The findings that follow from what each rank saw by itself, and from what they measured together, if they did.

    `world` is the number of ranks that there are, or would be.
    """
    seats = [one.seat for one in ranks]
    network = [(one.seat, one.network) for one in ranks]
    limits = [(one.seat, one.limits) for one in ranks]
    findings = [
        *judge_software([(one.seat, one.software) for one in ranks]),
        *judge_devices([(one.seat, one.devices) for one in ranks]),
        *judge_network(network),
        *judge_processors([(one.seat, one.processor) for one in ranks]),
    ]
    if any(one.devices.used for one in ranks):
        hosts = Verdict.skipped("ranks compute on devices")
    else:
        paces = group.paces.by_rank if group is not None and group.paces is not None else []
        hosts = judge_hosts([(one.seat, (one.host, one.processor)) for one in ranks], paces)
    findings.append(finding("ZD504", hosts))
    directories = [(one.seat, one.directory) for one in ranks]
    if group is None:
        return [*findings, *judge_limits(limits, world), *judge_directories(directories)]
    routes = [(seat, route) for seat, route in zip(seats, group.routes, strict=True) if route is not None]
    seen = None if group.seen is None else list(zip(seats, group.seen, strict=True))
    several = len(machines(network)) > 1
    speeds = [taken.speed_mbit for _, one in network if (taken := one.between_nodes) and taken.speed_mbit]
    findings += [
        *judge_limits(limits, world, routes),
        judge_clocks(list(zip(seats, group.offsets, strict=True))),
        *judge_directories(directories, seen),
        finding("ZD701", judge_all_reduce(group.all_reduce, min(speeds) if several and speeds else None)),
    ]
    if group.copies is not None:
        findings.append(finding("ZD204", judge_copies(group.copies)))
    if group.pairs:
        findings.append(finding("ZD702", judge_pairs(group.pairs, seats)))
    return findings


def _run(plan: Plan, work: Path, launch: Launch) -> Finding | None:
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
        verdict = Verdict.fault(
            f"{error}; last seen {_progress(plan, work)}",
            "A rank hangs, was never started, or cannot reach the others: training would wait in the same way.",
            "look at the faults above, if any, at firewalls between the nodes, and at that node's processes; "
            f"--timeout gives more time; logs: {work}",
        )
        return finding("ZD901", verdict)
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
    verdict = Verdict.fault(
        lines[0][:400] + last + full,
        f"Training would fail in the same way. Ranks were last seen {_progress(plan, work)}.",
        f"look at the faults above, if any, and at the logs in {work}",
    )
    return finding("ZD901", verdict)


def _progress(plan: Plan, work: Path) -> str:
    """How far each rank has come, by the files that it leaves; those that the others wait for come first."""
    stages: dict[int, list[str]] = {}
    for rank in range(plan.world):
        try:
            stage, host = (work / f"stage-{rank}").read_text().split("\n")
            stages.setdefault(STAGES.index(stage), []).append(f"{rank} on {host}")
        except (OSError, ValueError):
            stages.setdefault(-1, []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_MOST_NAMED])}"
        + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")
        + (" not running" if stage < 0 else f" {STAGES[stage]}")
        for stage, ranks in sorted(stages.items())
    )


def _read(work: Path, world: int) -> tuple[list[RankFacts], GroupFacts | None]:
    """What ranks have left: all of it, or as far as they came, which ZD901 reports."""
    ranks = [
        one for rank in range(world) if (one := _load(RankFacts, work / f"rank-{rank}.json")) is not None
    ]
    return ranks, _load(GroupFacts, work / "group.json") if len(ranks) == world else None


def _load(kind: type[T], path: Path) -> T | None:
    try:
        return from_plain(kind, parse_json(read_text(path)))
    except (OSError, ValueError, SchemaError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _by_code(findings: Sequence[Finding]) -> list[Finding]:
    order = list(CHECKS)
    return sorted(findings, key=lambda one: order.index(one.code))
