"""What ranks compare before every step, in one small all-reduce."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.storage import FlatUnit


class StepControl:
    """Whether some rank has gradients, whether any overflowed, and whether all have done the same so far."""

    def __init__(self, collectives: Collectives, storages: Sequence[FlatUnit], gradients: Gradients) -> None:
        self._collectives, self._storages, self._gradients = collectives, storages, gradients
        self._previous: Tensor | None = None

    def agree(self, *, overflow: bool, wait: bool) -> bool:
        """Returns whether any rank's gradients overflowed.

        Unless it must `wait` for that, a device's answer is looked at one step later: reading it at once would make
        the host wait for the device at every step.

        Raises `UsageError` where no rank has gradients, `LayoutMismatch` where ranks took different paths.
        """
        path = float((self._collectives.schedule ^ self._stopped_digest()) & 0xFFFFFFFF)
        control = torch.tensor(
            [float(overflow), float(self._gradients.received), path, -path], dtype=torch.float64
        ).to(self._collectives.device, non_blocking=True)
        self._collectives.all_reduce(control, dist.ReduceOp.MAX)
        if control.is_cuda and not wait:
            previous, self._previous = self._previous, control
        else:
            previous = control
        if previous is None:
            return False
        any_overflow, any_received, highest, lowest = previous.tolist()
        if not any_received:
            self._gradients.forget()
            raise UsageError(
                "step() before any backward(): no rank has gradients. Call optimizer.backward(loss) first"
            )
        if highest != -lowest:
            self._explain_paths()
        return bool(any_overflow)

    def _stopped_names(self) -> list[str]:
        return [
            storage.unit.parameters[position].name
            for storage in self._storages
            for position in sorted(self._gradients.skipped(storage))
        ]

    def _stopped_digest(self) -> int:
        return zlib.crc32("\n".join(self._stopped_names()).encode())

    def _explain_paths(self) -> NoReturn:
        stopped = self._collectives.all_gather_objects(self._stopped_names())
        for rank, names in enumerate(stopped):
            if names != stopped[0]:
                raise LayoutMismatch(
                    f"ranks have frozen different parameters since ZeroOptimizer was built: rank 0 {stopped[0]}, "
                    f"rank {rank} {names}. Call requires_grad_() alike on all ranks"
                )
        raise LayoutMismatch(
            "ranks issued different sequences of collectives in this step: their models took different paths"
        )
