"""Autograd's accumulating nodes, which show whether a backward pass brings gradients at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerokit.runtime.storage import FlatUnit


class Leaves:
    """The nodes of the trainable parameters, each asked for once."""

    def __init__(self, storages: Sequence[FlatUnit]) -> None:
        self._storages = [storage for storage in reversed(storages) if storage.unit.trainable]
        self._nodes: dict[tuple[int, int], Any] = {}

    def will_accumulate(self) -> bool:
        """Whether the engine's current task accumulates a gradient in any parameter."""
        for storage in self._storages:
            for position, parameter in enumerate(storage.parameters):
                if position in storage.stopped:
                    continue
                node = self._nodes.get((storage.unit.index, position))
                if node is None:
                    with torch._C.DisableTorchFunctionSubclass():
                        node = torch.autograd.graph.get_gradient_edge(parameter).node
                    self._nodes[storage.unit.index, position] = node
                try:
                    if torch._C._will_engine_execute_node(node):
                        return True
                except RuntimeError:  # autograd.grad with respect to this parameter
                    return False
        return False
