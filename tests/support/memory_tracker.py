"""A rank's memory over a step, by kind: parameters, gradients, optimizer, buckets and activations.

Every operation of torch is seen, and the storages of what it returns are followed for as long as they live; what the
optimizer holds from step to step it says itself. What torch allocates within an operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokit.formulas import KIND_OF_LINE, MEMORY_KINDS
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.measure import list_holdings

_TEMPORARY = MEMORY_KINDS[-1]

Held = tuple[str, Tensor, int | None]
"""What memory is for (of `MEMORY_KINDS`), a tensor in it, and the bytes in use, where these are not its whole storage.
"""


def held_by(zero: ZeroOptimizer) -> Iterator[Held]:
    """What an optimizer of zerokit's holds."""
    runtime = zero.runtime
    for one in list_holdings(runtime.model, runtime.units, runtime.gradients, runtime.inner):
        yield KIND_OF_LINE[one.line], one.tensor, one.used + one.padding


@dataclass(slots=True)
class _Followed:
    """A storage, what it is for, and the bytes of it that are in use where these are not all."""

    storage: weakref.ref[torch.UntypedStorage]
    kind: str = _TEMPORARY
    used: int | None = None


class MemoryTracker(TorchDispatchMode):
    """Records the memory held, after operations within its context and whenever `read` is called.

    Args:
        held: says what the engine holds.
    """

    def __init__(self, held: Callable[[], Iterable[Held]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._held = held
        self._followed: dict[int, _Followed] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the readings so far, but keep the kinds of storages."""
        self.readings: list[dict[str, int]] = []

    def read(self) -> None:
        """Take a reading now."""
        for one in self._followed.values():
            one.used = None
        for kind, tensor, used in self._held():
            if tensor.device.type != "cpu":
                continue
            one = self._follow(tensor)
            # Without an exact account the first purpose counts: an optimizer steps parameters, too.
            if used is not None or one.kind == _TEMPORARY:
                one.kind = kind
            one.used = used if used is None or one.used is None else max(one.used, used)
        sizes = dict.fromkeys(MEMORY_KINDS, 0)
        for key, one in list(self._followed.items()):
            if (storage := one.storage()) is None:
                del self._followed[key]
            else:
                sizes[one.kind] += storage.nbytes() if one.used is None else one.used
        self.readings.append(sizes)

    def _follow(self, tensor: Tensor) -> _Followed:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        one = self._followed.get(storage._cdata)
        if one is None or one.storage() is None:  # the address may have been another's
            one = self._followed[storage._cdata] = _Followed(weakref.ref(storage))
        return one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if not isinstance(value, Tensor):
                continue
            if value.device.type == "cpu" and value.layout == torch.strided:
                self._follow(value)
        self.read()
        return result
