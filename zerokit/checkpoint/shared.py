"""`Shared`: optimizer state of another shape than its parameter's, such as step counts, into a live optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerokit.checkpoint.common import Tensors
from zerokit.checkpoint.matching import Match
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.state import dtype_name, host_bytes, tensor_of
from zerokit.errors import CheckpointError
from zerokit.runtime.build import Parts
from zerokit.runtime.storage import MasterSlice, UnitState


class Shared:
    """State of another shape than its parameter's: by kind, each saved parameter's bytes or value."""

    def __init__(self, checkpoint: Source, match: Match, extra: Mapping[str, Any]) -> None:
        self._sources = match.sources
        self._line = list(checkpoint.manifest.layout.parameters)
        self.forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Dtype and shape of the kinds that are tensors."""
        self._rows: dict[str, dict[int, bytes]] = {}
        self._values: Mapping[str, Mapping[str, Any]] = extra["values"]
        tensors = Tensors(checkpoint)
        for scalar in checkpoint.manifest.scalars:
            name = f"optimizer/{scalar.kind}"
            tensor = tensors.get(name, torch.empty(0))
            dtype, shape = dtype_name(tensor), tuple(tensor.shape)
            if (dtype, shape) != (scalar.dtype, (len(scalar.parameters), *scalar.shape)):
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is {dtype}{list(shape)}, not as the manifest says"
                )
            self.forms[scalar.kind] = dtype, scalar.shape
            data = host_bytes(tensor)
            size = len(data) // max(len(scalar.parameters), 1)
            self._rows[scalar.kind] = {
                position: bytes(data[row * size : (row + 1) * size])
                for row, position in enumerate(scalar.parameters)
            }

    def of(self, storage: UnitState, position: int) -> dict[str, Any]:
        """By kind, what was saved for one parameter of a unit."""
        source = self._sources.get(storage.unit.parameters[position].name)
        if source is None:
            return {}
        name = self._line[source].name
        rows = {kind: rows[source] for kind, rows in self._rows.items() if source in rows}
        return rows | {kind: values[name] for kind, values in self._values.items() if name in values}

    def key(self, storage: UnitState, position: int) -> str:
        """Equal for parameters that may share a flat tensor."""
        return repr(sorted(self.of(storage, position).items()))

    def apply(self, parts: Parts, storage: UnitState, flat: MasterSlice) -> None:
        """Give a flat tensor's state what was saved for its parameters, which is the same for all of them."""
        inner = parts.inner
        group = inner.param_groups[flat.group]
        state = dict(inner.state.get(flat.tensor, {}))
        # A piece that is all padding belongs to no parameter: it takes the count of any in the unit.
        fitting = storage.positions_in(flat) or [
            index for index, p in enumerate(storage.unit.parameters) if p.group == flat.group
        ]
        for kind, value in self.of(storage, fitting[0]).items():
            form = self.forms.get(kind)
            if form is None:
                state[kind] = value
                continue
            dtype, shape = form
            tensor = tensor_of(value, dtype, shape)
            # As torch's own load_state_dict: fused kernels want the count beside the parameter, others on the host.
            beside = kind != "step" or group.get("fused") or group.get("capturable")
            state[kind] = tensor.to(flat.tensor.device) if beside else tensor
        if state:
            inner.state[flat.tensor] = state
