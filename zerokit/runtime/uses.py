"""Which units a forward pass has used, and so which of them backward is done with when it enters another one.

Autograd runs nodes in reverse order of creation: when an output of unit A receives its gradient, every node created
after A's last use has run. Units that this rank's forward used only later than that are over. Of units that it never
entered, the graph tells which parameters were used all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from zerokit.runtime.storage import FlatUnit


class Uses:
    """The uses of unit modules in one forward pass of this rank."""

    def __init__(self, storages: Sequence[FlatUnit]) -> None:
        self._storages = storages
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self.unreachable: dict[int, set[int]] = {}
        """Positions of unused parameters in units of which no module was entered."""
        self._clock = 0

    def begin(self) -> None:
        """A forward pass starts."""
        self._first.clear()
        self._last.clear()
        self.unreachable.clear()

    def enter(self, index: int) -> None:
        """A module of unit `index` is about to run."""
        self._clock += 1
        self._first.setdefault(index, self._clock)
        self._last[index] = self._clock

    def end(self, outputs: Iterable[Tensor]) -> None:
        """The pass has produced `outputs`: find what no gradient can reach in units that were not entered."""
        absent = [s for s in self._storages if s.unit.trainable and s.unit.index not in self._first]
        if absent:
            reached = {id(leaf) for leaf in _leaves(outputs)}
            for storage in absent:
                places = {place for place, p in enumerate(storage.parameters) if id(p) not in reached}
                self.unreachable[storage.unit.index] = places

    def over(self, units: Collection[FlatUnit]) -> set[int]:
        """Units whose last gradient has arrived once an output of `units` receives its own."""
        last = max((self._last.get(unit.unit.index, 0) for unit in units), default=0)
        return {index for index, first in self._first.items() if last and first > last}


def _leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors whose gradients accumulate when `outputs` are differentiated."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        waiting.extend(following for following, _ in node.next_functions if following is not None)
