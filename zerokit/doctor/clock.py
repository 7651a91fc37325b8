"""How far the ranks' clocks are apart."""

from __future__ import annotations

from zerokit.doctor.findings import Answers, Finding, Verdict, finding, where
from zerokit.offsets import Offset

SKEW_NOTICED_S = 0.5
"""NTP keeps clocks within some milliseconds; half a second means that it does not run."""
SKEW_REFUSED_S = 60.0
"""Object stores refuse requests signed 15 minutes off, Kerberos 5; file times confuse tools long before."""


def judge_clocks(answers: Answers[Offset]) -> Finding:
    """ZD501, with the ranks whose clocks differ most."""
    if len(answers) < 2:
        return finding("ZD501", Verdict.skipped("one rank: nothing to compare"))
    (first, low), (last, high) = (pick(answers, key=lambda entry: entry[1].seconds) for pick in (min, max))
    skew, doubt = high.seconds - low.seconds, low.uncertainty_s + high.uncertainty_s
    listed = f"{_time(skew)} apart at most (± {_time(doubt)})"
    # What the measurement cannot distinguish from zero is no skew.
    if skew - doubt <= SKEW_NOTICED_S:
        return finding("ZD501", Verdict.ok(listed))
    judge, meaning = Verdict.warning, "Logs and traces of different nodes cannot be put in order."
    if skew - doubt > SKEW_REFUSED_S:
        judge = Verdict.fault
        meaning = "Signed requests and tickets are refused, and newer files look older than old ones."
    remedy = "let every node follow a time server: timedatectl set-ntp true, chronyc makestep"
    seats = [seat for seat, _ in answers]
    return finding(
        "ZD501", judge(listed, meaning, remedy), " and ".join(where([one], seats) for one in (first, last))
    )


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"
