"""How fast ranks compute, copy and exchange, as plain data. `computing` and `wire` measure it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one rank computes in fp32."""

    gflops: float  # of products of 512 x 512 matrices, in 10^9 FLOP/s
    block_ms: float  # forward and backward of a small feed-forward block
    gb_per_s: float  # read and written by the sum of two arrays that no cache holds, in 10^9 bytes a second
    page_s: float  # what the first write to a page of fresh memory costs


@dataclass(frozen=True, slots=True)
class Paces:
    """How fast ranks compute alone and together."""

    threads: int  # of each rank
    alone: Pace  # rank 0, while all others wait
    together: Pace  # the slowest rank while all of them compute
    # The products of every rank while all of them compute, in 10^9 FLOP/s.
    by_rank: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the slowest rank from and to pinned memory while all ranks copy, in 10^9 bytes a second."""

    to_device_gb_per_s: float  # from the host alone
    to_host_gb_per_s: float  # from the device alone
    both_gb_per_s: float  # each way, while the other way is in use as well


@dataclass(frozen=True, slots=True)
class UnitSpeeds:
    """Collectives of a unit among ranks of a node that read each other's memory, all ranks at once.

    Bandwidths are bytes that a rank receives in a second, in 10^9.
    """

    latency_s: float  # the time of a gather of a few bytes
    gather_gb_per_s: float  # into memory that is there
    fresh_gb_per_s: float  # into memory that the system has just handed out, as at stage 3
    reduce_gb_per_s: float  # with the addition


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce of one size: the slowest rank's median time, and whether every sum was right."""

    size_bytes: int
    time_s: float
    bus_gb_per_s: float
    backend: str
    correct: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes that send to each other at the same time; bandwidth is per direction."""

    first: int
    second: int
    size_bytes: int
    time_s: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class AxisLink:
    """Exchanges between neighbours on one axis, all at the same time as in training."""

    axis: str  # "inner", the ranks of a node, or "outer", ranks with the same position on different nodes
    ranks: int  # how many ranks the axis has
    latency_s: float  # the time of an exchange of four bytes
    gb_per_s: float  # bytes that each rank sends, and receives, in a second, in 10^9
    size_bytes: int  # of the messages that gave the bandwidth
    # The part of a host's computing speed that an exchange takes while it is in flight; None on devices.
    slowdown: float | None = None
    # Collectives of zerokit where the ranks of a node read each other's memory; None elsewhere.
    units: UnitSpeeds | None = None
