"""The collectives of a unit as hops over the axes of a mesh, and how long each takes on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from zerokit.placement import Axis, Mesh
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import HUGE_PAGE_BYTES, Cluster


@dataclass(frozen=True, slots=True)
class Hop:
    """One collective of a unit over an axis: seconds on its link, and seconds of the rank's own copying."""

    axis: Axis
    link: str
    link_s: float
    copy_s: float
    share: float


class Hops:
    """The collectives of units over the axes of a mesh, and how long each takes on a cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster, efficiency: Efficiency) -> None:
        self._mesh = mesh
        self._cluster = cluster
        self._efficiency = efficiency

    def gather(self, axes: Collection[Axis], payload_bytes: float, *, fresh: bool = False) -> list[Hop]:
        """All-gather over `axes`, the outer one first, to so many bytes; on hosts perhaps into `fresh` memory."""
        hops = []
        for axis in (Axis.OUTER, Axis.INNER):
            if axis in axes:
                cut = self._mesh.inner if axis is Axis.OUTER else 1
                hops += self._hop(axis, payload_bytes / cut, adds=False, fresh=fresh)
        return hops

    def reduce(
        self,
        wire_bytes: float,
        sum_bytes: float,
        *,
        back: Collection[Axis],
        inner_bytes: float | None = None,
    ) -> list[Hop]:
        """Reduce-scatter over all axes, the inner one first, and the way `back` where sums stay whole.

        Before the last axis `inner_bytes` move, where they are not `wire_bytes`.
        """
        hops = []
        for axis in reversed(self._mesh.axes):
            cut = self._mesh.inner if axis is Axis.OUTER else 1
            moved = wire_bytes if inner_bytes is None or axis is self._mesh.axes[0] else inner_bytes
            hops += self._hop(axis, moved / cut, adds=True)
        return hops + self.gather(back, sum_bytes)

    def exchange(self, crossing_bytes: Mapping[Axis, float]) -> list[Hop]:
        """Pieces from rank to rank, so many bytes over each axis and all ranks: like a gather of as many."""
        hops = []
        for axis, moved in crossing_bytes.items():
            ranks = self._mesh.size(axis)
            hops += self._hop(axis, moved / self._mesh.world * ranks / (ranks - 1), adds=False)
        return hops

    def _hop(self, axis: Axis, payload_bytes: float, *, adds: bool, fresh: bool = False) -> list[Hop]:
        """Ranks of `axis` exchange so many bytes in all, and add up what they receive if `adds`."""
        ranks = self._mesh.size(axis)
        if ranks == 1:
            return []
        per_node = self._cluster.ranks_per_node
        stride = 1 if axis is Axis.INNER else self._mesh.inner
        here = max(1, min(ranks, per_node // stride))
        nodes = -(-ranks // here)
        received = payload_bytes * (ranks - 1) / ranks
        moving = self._efficiency.moving_seconds
        inside = latency = 0.0
        if here > 1:
            link = self._cluster.link(inside=True)
            near = payload_bytes * (here - 1) / ranks
            if link.reading is not None and nodes == 1:
                speeds = link.reading
                # Small units pass their pages on to each other.
                fresh = fresh and payload_bytes / ranks >= HUGE_PAGE_BYTES
                speed = speeds.reduce if adds else speeds.fresh if fresh else speeds.gather
                return [Hop(axis, "inside", 0.0, near / speed + link.latency_s, 0.0)]
            inside = (received if link.relays else near) / link.bytes_per_s
            latency = link.latency_s * (ranks - nodes if link.relays else 1)
        if nodes > 1:
            link = self._cluster.link(inside=False)
            # Every rank of a node receives its own messages from other hosts; rings enter a node once a group.
            far = received if link.relays else payload_bytes * (ranks - here) / ranks * here
            inside = max(inside, far * (per_node // here) / link.bytes_per_s)
            latency += link.latency_s * (nodes - 1 if link.relays else 1)
        share = max(link.share, self._efficiency.communication)
        # Hosts add up what has arrived themselves, NCCL's kernels do so on the way.
        added = 0.0 if link.relays or not adds else moving(received + payload_bytes / ranks)
        return [Hop(axis, "inside" if nodes == 1 else "network", inside + latency, added, share)]
