"""`Shared`: loads optimizer state whose shape differs from its parameter's, such as step counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint.manifest import WEIGHT_KINDS
from zerokit.checkpoint.matching import NOT_THE_OPTIMIZERS, Match
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.state import dtype_name, host_bytes, tensor_of
from zerokit.errors import CheckpointError
from zerokit.runtime.build import Runtime
from zerokit.runtime.masters import MasterSlice
from zerokit.runtime.unit import UnitState


class Shared:
    """State whose shape differs from its parameter's: each saved parameter's bytes or value, by kind."""

    def __init__(self, checkpoint: Source, match: Match, extra: Mapping[str, Any]) -> None:
        self._sources = {name: at for name, at in match.sources.items() if at not in match.fresh}
        self._line = list(checkpoint.manifest.layout.parameters)
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._values: Mapping[str, Mapping[str, Any]] = extra["values"]
        self._streams: dict[int, set[str]] = {}
        """The kinds of state that have a parameter's shape, by position."""
        for stream in checkpoint.manifest.streams:
            for position in stream.parameters if stream.kind not in WEIGHT_KINDS else ():
                self._streams.setdefault(position, set()).add(stream.kind)
        tensors = Tensors(checkpoint, tensor_of)
        for scalar in checkpoint.manifest.scalars:
            name = f"optimizer/{scalar.kind}"
            tensor = tensors.get(name, torch.empty(0))
            dtype, shape = dtype_name(tensor), tuple(tensor.shape)
            if (dtype, shape) != (scalar.dtype, (len(scalar.parameters), *scalar.shape)):
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is {dtype}{list(shape)}, not as the manifest says"
                )
            self._rows[scalar.kind] = dict(zip(scalar.parameters, tensor, strict=True))

    def of(self, unit: UnitState, position: int) -> dict[str, Any]:
        """The saved values for one parameter of a unit, by kind."""
        source = self._sources.get(unit.unit.parameters[position].name)
        if source is None:
            return {}
        name = self._line[source].name
        rows = {kind: rows[source] for kind, rows in self._rows.items() if source in rows}
        return rows | {kind: values[name] for kind, values in self._values.items() if name in values}

    def kinds(self, unit: UnitState, position: int) -> set[str]:
        """The saved kinds of state that have the shape of this parameter of a unit."""
        source = self._sources.get(unit.unit.parameters[position].name)
        return set() if source is None else self._streams.get(source, set())

    def key(self, unit: UnitState, position: int) -> str:
        """A key that is equal for parameters that may share a master."""
        values = {
            kind: bytes(host_bytes(value)) if isinstance(value, Tensor) else value
            for kind, value in self.of(unit, position).items()
        }
        return repr((sorted(self.kinds(unit, position)), sorted(values.items())))

    def apply(self, runtime: Runtime, unit: UnitState, master: MasterSlice) -> None:
        """Set a master's state to the value saved for its parameters, which is equal for all of them."""
        inner = runtime.inner
        group = inner.param_groups[master.group]
        # A piece that is all padding belongs to no parameter: it takes the count of any in the unit.
        fitting = unit.positions_in(master) or [
            index for index, p in enumerate(unit.unit.parameters) if p.group == master.group
        ]
        kinds = NOT_THE_OPTIMIZERS | self.kinds(unit, fitting[0])
        state = {k: value for k, value in inner.state.pop(master.tensor, {}).items() if k in kinds}
        for kind, value in self.of(unit, fitting[0]).items():
            if kind not in self._rows:
                state[kind] = value
                continue
            # As torch's own load_state_dict: fused kernels want the count beside the parameter, others on the host.
            beside = kind != "step" or group.get("fused") or group.get("capturable")
            state[kind] = value.to(master.tensor.device if beside else "cpu", copy=True)
        if state:
            inner.state[master.tensor] = state
