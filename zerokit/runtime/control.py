"""What ranks compare before every step, in one small all-reduce."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.collectives import Collectives, PendingNumbers
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.storage import FlatUnit

_DIFFERENT_PATHS = (
    "ranks issued different sequences of collectives in this step: their models took different paths"
)


class StepControl:
    """Whether some rank has gradients, whether all are finite, and whether all ranks have done the same so far.

    Where the host runs ahead of a device, it looks at a step's numbers in the next step: at once, it would wait for
    the device in every step. Only a rank that has no gradients looks at once, and all do in fp16.
    """

    def __init__(self, collectives: Collectives, storages: Sequence[FlatUnit], gradients: Gradients) -> None:
        self._collectives, self._storages, self._gradients = collectives, storages, gradients
        self._pending: PendingNumbers | None = None

    def agree(self, finite: Tensor | None) -> bool:
        """Returns whether every rank's gradients are `finite` (0-d, bool); True where `finite` is None.

        Raises `UsageError` where no rank has gradients, `LayoutMismatch` where ranks took different paths.
        """
        path = float((self._collectives.schedule ^ self._stopped_digest()) & 0xFFFFFFFF)
        received = self._gradients.received
        previous, self._pending = self._pending, None
        reading = self._collectives.agree_soon(
            [path, -path, float(received)], None if finite is None else ~finite
        )
        if previous is not None and _differ(previous.get()):
            self._explain_paths()
        late = self._collectives.runs_ahead and finite is None
        if late:
            self._pending = reading
            if received:
                return True
        numbers = reading.get()
        if not numbers[2]:
            self._pending = None
            self._gradients.forget()
            raise UsageError(
                "step() before any backward(): no rank has gradients. Call optimizer.backward(loss) first"
            )
        if not late and _differ(numbers):
            self._explain_paths()
        return not numbers[3]

    def finish(self) -> None:
        """Look at what is pending. Raises `LayoutMismatch` as `agree` does, without asking the other ranks."""
        previous, self._pending = self._pending, None
        if previous is not None and _differ(previous.get()):
            raise LayoutMismatch(_DIFFERENT_PATHS)

    def end(self) -> None:
        """The optimizer is deleted: warn of what the last step has shown, without waiting for it."""
        pending, self._pending = self._pending, None
        with suppress(RuntimeError):  # the device may be gone
            if pending is not None and pending.arrived() and _differ(pending.get()):
                warnings.warn(f"the last step: {_DIFFERENT_PATHS}", RuntimeWarning, stacklevel=2)

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
        raise LayoutMismatch(_DIFFERENT_PATHS)


def _differ(numbers: Sequence[float]) -> bool:
    """Whether some rank's path is another one, by the maximum of the numbers and the maximum of their negatives."""
    return numbers[0] != -numbers[1]
