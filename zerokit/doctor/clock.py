"""The offsets between the ranks' clocks, measured over the process group.

    rank 0   ──── its time T ───▶          offset = T + (b − a) / 2 − b
    rank r   a ─ asks ─── b, answered      uncertain by (b − a) / 2, so the fastest round of some counts

Cristian's algorithm (Distributed Computing 3, 1989). Clocks of one machine are one clock: any offset there is the
noise of the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerokit.doctor.findings import Answers, Finding, Verdict, finding, machines, where

if TYPE_CHECKING:
    import torch.distributed as dist

ROUNDS = 10
SKEW_NOTICED_S = 0.5
"""NTP keeps clocks within some milliseconds; half a second means that it does not run."""
SKEW_REFUSED_S = 60.0
"""Object stores refuse requests signed 15 minutes off, Kerberos 5; file times confuse tools long before."""


@dataclass(frozen=True, slots=True)
class Offset:
    """A rank's clock offset from rank 0, in seconds, and its error bound: half the round trip."""

    seconds: float
    uncertainty_s: float


def measure_offset(group: dist.ProcessGroup, now: Callable[[], float] = time.time) -> Offset:
    """Measure the offset of this rank's clock, `now`. Collective: rank 0 answers one rank after the other.

    `group` is gloo's, of all ranks.
    """
    import torch
    import torch.distributed as dist

    rank, cell = group.rank(), torch.zeros(1, dtype=torch.float64)
    best = Offset(0.0, float("inf")) if rank else Offset(0.0, 0.0)
    for peer in range(1, group.size()):
        if rank not in (0, peer):
            continue
        for _ in range(ROUNDS):
            if rank == 0:
                dist.recv(cell, peer, group=group)
                cell[0] = now()
                dist.send(cell, peer, group=group)
                continue
            sent = now()
            dist.send(cell, 0, group=group)
            dist.recv(cell, 0, group=group)
            answered = now()
            half = (answered - sent) / 2
            if half < best.uncertainty_s:
                best = Offset(answered - half - float(cell.item()), half)
    return best


def judge_clocks(answers: Answers[Offset]) -> Finding:
    """ZD501, with the ranks whose clocks differ most."""
    if len(answers) < 2:
        return finding("ZD501", Verdict.skipped("one rank: nothing to compare"))
    (first, low), (last, high) = (pick(answers, key=lambda entry: entry[1].seconds) for pick in (min, max))
    skew, seats = high.seconds - low.seconds, [seat for seat, _ in answers]
    verdict = _judge(skew, low.uncertainty_s + high.uncertainty_s, several=len(machines(answers)) > 1)
    differ = " and ".join(where([seat], seats) for seat in (first, last)) if skew > SKEW_NOTICED_S else ""
    return finding("ZD501", verdict, differ)


def _judge(skew: float, doubt: float, *, several: bool) -> Verdict:
    listed = f"{_time(skew)} apart at most (± {_time(doubt)})"
    remedy = "let every node follow a time server: timedatectl set-ntp true, chronyc makestep"
    # What the measurement cannot distinguish from zero is no skew.
    if skew - doubt > SKEW_REFUSED_S:
        return Verdict.fault(
            listed,
            "Signed requests and tickets are refused, and newer files look older than old ones.",
            remedy,
        )
    if skew - doubt > SKEW_NOTICED_S:
        return Verdict.warning(listed, "Logs and traces of different nodes cannot be put in order.", remedy)
    return Verdict.ok(listed if several else f"one machine, one clock (measured: {listed})")


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"
