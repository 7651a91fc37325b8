"""What ranks measured together, judged: their clocks, the wire, and copies between devices and hosts."""

from __future__ import annotations

from collections.abc import Sequence

from zerokit.bench.machine.speeds import AllReduce, Copies, Pair
from zerokit.doctor.directory import PER_BILLION_BYTES
from zerokit.doctor.findings import Seat, Verdict, fault, ok, skipped, warning, where
from zerokit.offsets import Offset

SKEW_NOTICED_S = 0.5
"""NTP keeps clocks within some milliseconds; half a second means that it does not run."""
SKEW_REFUSED_S = 60.0
"""Object stores refuse requests signed 15 minutes off, Kerberos 5; file times confuse tools long before."""
SLOW_COPIES_GB_PER_S = 5.0
"""Eight lanes of PCIe 3 reach about 6."""
SLOW_GB_PER_S = 0.1
"""Gigabit Ethernet gives 0.118."""
SHARE_OF_LINK = 0.25
"""The least share of the speed that the interface promises."""
SLOW_PAIR = 0.5
"""A pair is slow below this share of the fastest pair's bandwidth."""


def judge_clocks(offsets: Sequence[Offset], seats: Sequence[Seat]) -> Verdict:
    """ZD501, with the ranks whose clocks differ most."""
    if len(offsets) < 2:
        return skipped("one rank: nothing to compare")
    (first, low), (last, high) = (
        pick(zip(seats, offsets, strict=True), key=lambda pair: pair[1].seconds) for pick in (min, max)
    )
    skew, doubt = high.seconds - low.seconds, low.uncertainty_s + high.uncertainty_s
    listed = f"{_time(skew)} apart at most (± {_time(doubt)})"
    # What the measurement cannot distinguish from zero is no skew.
    if skew - doubt <= SKEW_NOTICED_S:
        return ok(listed)
    verdict, meaning = warning, "Logs and traces of different nodes cannot be put in order."
    if skew - doubt > SKEW_REFUSED_S:
        verdict = fault
        meaning = "Signed requests and tickets are refused, and newer files look older than old ones."
    remedy = "let every node follow a time server: timedatectl set-ntp true, chronyc makestep"
    return verdict(listed, meaning, remedy, " and ".join(where([one], seats) for one in (first, last)))


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def judge_copies(copies: Copies | None) -> Verdict | None:
    """ZD204."""
    if copies is None:
        return None
    seconds = PER_BILLION_BYTES / copies.both_gb_per_s / 1e9
    listed = (
        f"{copies.to_device_gb_per_s:,.1f} GB/s to the device, {copies.to_host_gb_per_s:,.1f} to the host, "
        f"{copies.both_gb_per_s:,.1f} each way at once: {seconds:,.2f} s a step per 10⁹ parameters"
    )
    if copies.both_gb_per_s >= SLOW_COPIES_GB_PER_S:
        return ok(listed)
    return warning(
        listed,
        'The link is slower than eight lanes of PCIe 3, so steps with states="host" take long.',
        "compare pcie.link.gen and pcie.link.width in nvidia-smi -q with the slot, and bind ranks to the device's node "
        "(numactl)",
    )


def judge_all_reduce(measured: AllReduce | None, link_mbit: int | None) -> Verdict:
    """ZD701; `link_mbit` is what the interface between machines promises, None where unknown, or on one machine."""
    if measured is None:
        return skipped("one rank: nothing to send")
    listed = (
        f"{measured.bus_gb_per_s:.2f} GB/s bus bandwidth, {measured.size_bytes / 2**20:g} MiB in "
        f"{measured.time_s * 1000:.1f} ms ({measured.backend})"
    )
    if not measured.correct:
        return fault(
            f"a wrong sum; {listed}",
            "Ranks do not get what they should: gradients would be wrong silently.",
            "try other memory, cards or cables; test with NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1",
        )
    link = 0.0 if link_mbit is None else link_mbit / 8000
    if measured.bus_gb_per_s < SHARE_OF_LINK * link:
        meaning = f"Less than a quarter of the {link:.2f} GB/s that the interface promises."
    elif measured.bus_gb_per_s < SLOW_GB_PER_S:
        meaning = "Slower than gigabit Ethernet: steps will wait for gradients."
    else:
        return ok(listed)
    remedy = "check the interface in use (ZD301, ZD302), MTU, load and other traffic; try --pairs"
    return warning(listed, meaning, remedy)


def judge_pairs(pairs: Sequence[Pair], seats: Sequence[Seat]) -> Verdict | None:
    """ZD702."""
    if not pairs:
        return None
    named = {seat.node: f"{seat.node} ({seat.host})" for seat in seats}
    worst, fastest = (pick(pairs, key=lambda pair: pair.gb_per_s) for pick in (min, max))
    slow = [pair for pair in pairs if pair.gb_per_s < SLOW_PAIR * fastest.gb_per_s]
    if not slow:
        several = len(pairs) > 1
        speeds = f"{worst.gb_per_s:.2f}" + (f" to {fastest.gb_per_s:.2f}" if several else "")
        number = f"{len(pairs)} pairs" if several else "one pair, nothing to compare"
        return ok(f"{number}: {speeds} GB/s in each direction")
    listed = (
        f"nodes {named[worst.first]} and {named[worst.second]}: {worst.gb_per_s:.3g} GB/s; "
        f"the fastest pair, {fastest.first} and {fastest.second}: {fastest.gb_per_s:.3g}"
    )
    common = set.intersection(*({pair.first, pair.second} for pair in slow))
    if len(slow) > 1 and len(common) == 1:
        node = named[common.pop()]
        # All pairs with this node are slow, and no others: the node is, and not a link between two.
        meaning = f"All {len(slow)} slow pairs have node {node}: it holds up every ring."
        remedy = f"look at the cable, the port and the interface of node {node}, or leave it out"
    else:
        meaning = (
            f"{len(slow)} of {len(pairs)} pairs are less than half as fast as the fastest: rings wait there."
        )
        remedy = "look at the link between these nodes, or choose nodes that are closer to each other"
    return warning(listed, meaning, remedy)
