"""One rank on a device whose other ranks do not exist: it does its own part, in the order and on the streams of NCCL's.

What a GPU does for one rank of many, and what it holds, can so be measured on one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Cut
from zerokit.placement import Mesh
from zerokit.runtime.collectives.groups import imagine_axes
from zerokit.runtime.collectives.nccl import NcclCollectives, StreamRoute
from zerokit.runtime.collectives.route import Hop, Kind, Parcels, Wire
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.collectives.streams import CudaStream, Launch, Operation
from zerokit.runtime.shards import Shards


class PredictedRoute(StreamRoute):
    """An axis of which this process is the only rank that exists: the device does its part, on the side streams."""

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        name, reads = Kind.ALL_GATHER.of(whole.unit.index), [] if own is None else [own]
        return self._launch(
            self._gathers, name, super().gather(whole, cut, own), reads, [whole.at(cut.whole)]
        )

    def reduction(self, bucket: Shards, cut: Cut, out: Tensor, wire: Wire) -> Hop:
        name, flat = Kind.REDUCE_SCATTER.of(bucket.unit.index), bucket.at(cut.whole)
        return self._launch(
            self._reductions, name, super().reduction(bucket, cut, out, wire), [flat], [out, flat]
        )

    def exchange(self, kind: Kind, unit: int, parcels: Parcels) -> Hop:
        writes = [into for _, _, into in parcels.receives]
        return self._launch(
            self._reductions, kind.of(unit), super().exchange(kind, unit, parcels), [], writes
        )

    def _launch(
        self, stream: CudaStream, name: str, hop: Hop, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Launch:
        return Launch(stream, Operation(name, partial(hop, None), reads, writes))


class PredictedCollectives(NcclCollectives):
    """Collectives of one rank on a device, whose other ranks do not exist."""

    others_answer = False


def predict_nccl(
    group: dist.ProcessGroup,
    mesh: Mesh,
    device: torch.device,
    reporter: StallReporter,
    timeout: datetime.timedelta,
    *,
    make_stream: Callable[[torch.device], CudaStream] = CudaStream,
) -> PredictedCollectives:
    """One rank's part of `make_nccl`'s collectives over a mesh: `group` has its rank and their number, and no others.

    As there, the outer axis has one stream for gathers and reductions.
    """
    *outer, inner = imagine_axes(group, mesh)
    control, between, gathers, reductions = (make_stream(device) for _ in range(4))
    routes = [PredictedRoute(one, (between, between), reporter) for one in outer]
    routes.append(PredictedRoute(inner, (gathers, reductions), reporter))
    between_all = PredictedRoute(group, (control, control), reporter) if outer else None
    streams = [*([between] if outer else []), gathers, reductions, control]
    return PredictedCollectives(group, mesh, routes, device, reporter, timeout, between_all, streams=streams)
