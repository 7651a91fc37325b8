"""The parts of a step: the ranks' agreement, the gradient norm, and the update of the masters.

The norm has the same bits however the line is cut, and nothing of it is read on the host.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from zerokit.errors import LayoutMismatch, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.unit import UnitState, write_back


class StepControl:
    """The ranks' agreement before a step: whether any has gradients, all are finite, and all have the same schedule.

    Where the host runs ahead of a device, it looks at a step's numbers in the next step, so as not to wait for the
    device. Only a rank that has no gradients looks at once, and all do in fp16.
    """

    def __init__(self, collectives: Collectives, gradients: Gradients, inner: Optimizer) -> None:
        self._collectives, self._gradients, self._inner = collectives, gradients, inner
        self._pending: Callable[[], list[float]] | None = None

    def agree(self, finite: Tensor | None) -> bool:
        """Returns whether every rank's gradients are `finite` (0-d, bool); True where `finite` is None.

        Raises `UsageError` where no rank has gradients, `LayoutMismatch` where ranks took different paths.
        """
        path = float((self._collectives.schedule ^ self._digest()) & 0xFFFFFFFF)
        received = self._gradients.received
        reading = self._collectives.agree_soon(
            [path, -path, float(received)], None if finite is None else ~finite
        )
        self.finish()
        late = self._collectives.runs_ahead and finite is None
        if late:
            self._pending = reading
            if received:
                return True
        numbers = reading()
        if not numbers[2]:
            self._pending = None
            self._gradients.forget()
            raise UsageError(
                "step() before any backward(): no rank has gradients. Call optimizer.backward(loss) first"
            )
        if not late:
            _require_one_path(numbers)
        return not numbers[3]

    def finish(self) -> None:
        """Check pending results. Raises `LayoutMismatch` like `agree`, without communication."""
        previous, self._pending = self._pending, None
        if previous is not None:
            _require_one_path(previous())

    def _digest(self) -> int:
        """A checksum of the parameters that are left out, and of the groups' numbers (tensors would be waited for)."""
        stopped = [(index, *sorted(unit.skipped)) for index, unit in self._gradients.units.items()]
        numbers = [
            [(name, float(value)) for name, value in group.items() if type(value) in (int, float)]
            for group in self._inner.param_groups
        ]
        return zlib.crc32(repr((stopped, numbers)).encode())


def _require_one_path(numbers: Sequence[float]) -> None:
    """`numbers` begin with the maximum of the ranks' paths, and that of their negatives."""
    if numbers[0] != -numbers[1]:
        raise LayoutMismatch(
            "ranks issued different sequences of collectives (in this step, or in a pass that failed on some of them), "
            "or have frozen different parameters, set other numbers in param_groups, or changed weights or loaded a "
            "state differently since ZeroOptimizer was built: their models must take the same path, requires_grad_() "
            "and load_state_dict() be called alike on all ranks, and learning rates follow an averaged loss"
        )


_CHUNK = 1 << 16
"""Elements converted to fp64 at a time: half a MiB stays in a core's cache."""


def global_norm(shards: Sequence[Tensor], norm_type: float, collectives: Collectives) -> Tensor:
    """The `norm_type`-norm of all ranks' `shards` together, by one all-reduce of one fp64 number; 0-d, fp64.

    Partial sums in fp32 would differ with the cut (29 different results in 30 cuts, measured).
    """
    if math.isinf(norm_type):
        local = _largest(shards, collectives.device)
        # A maximum over ranks may drop a nan.
        local = torch.where(local.isnan(), math.inf, local)
        collectives.all_reduce(local, dist.ReduceOp.MAX)
        return local
    local = _power_sum(shards, norm_type, collectives.device)
    collectives.all_reduce(local, dist.ReduceOp.SUM)
    return local.sqrt() if norm_type == 2.0 else local.pow(1.0 / norm_type)


def all_finite(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether no element is inf or nan, as a 0-d tensor: one check over all shards."""
    return _largest(shards, device).isfinite()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm (both 0-d, fp64); 1 if the norm is not finite.

    Computed in fp32, as torch.nn.utils.clip_grad_norm_ does it, so that results can be compared in bits.
    """
    coefficient = (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
    # Otherwise all gradients would become nan, the padding of kept buckets too, which nothing would ever clear.
    return torch.where(norm.isfinite(), coefficient.double(), 1.0)


def _largest(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude, or nan where there is one; 0-d, fp64."""
    filled = [shard for shard in shards if shard.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        return torch.stack(torch._foreach_norm(filled, math.inf)).max().double()
    return torch.stack([extreme for shard in filled for extreme in torch.aminmax(shard)]).abs().max().double()


def _power_sum(shards: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of the elements' magnitudes to the power of `norm_type`; 0-d, fp64."""
    filled = [shard for shard in shards if shard.numel()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        # Accumulates in fp64 without a copy in fp64, which `vector_norm(dtype=...)` makes.
        norms = torch._foreach_norm(filled, norm_type, dtype=torch.float64) if filled else ()
        return torch.stack([total, *norms]).pow(norm_type).sum()
    # Small ones together: each operation has its price on the host.
    small = [shard for shard in filled if shard.numel() <= _CHUNK // 8]
    large = [shard for shard in filled if shard.numel() > _CHUNK // 8]
    for shard in (*large, torch.cat(small)) if small else large:
        for chunk in shard.split(_CHUNK):
            wide = chunk.double()
            total += torch.dot(wide, wide) if norm_type == 2.0 else (wide.abs() ** norm_type).sum()
    return total


INTERRUPTED = (
    "an exception ended the last step amid its update, so the state is incomplete: load a checkpoint, or build the "
    "model anew"
)
"""Why steps are refused after that; a load of weights alone does not make up for it."""


def update_masters(units: Sequence[UnitState], gradients: Gradients, inner: Optimizer) -> None:
    """Run `inner` over all masters with the reduced gradients, and write them back."""
    trainable = [unit for unit in units if unit.unit.trainable]
    for unit in trainable:
        own = gradients.units[unit.index]
        skipped = own.skipped
        if skipped and not all(
            skipped.issuperset(positions) or skipped.isdisjoint(positions)
            for positions in map(unit.positions_in, unit.masters)
        ):
            unit.divide(inner)
        unit.unguard_masters()
        for master in unit.masters:
            if skipped and skipped.issuperset(unit.positions_in(master)):
                master.tensor.grad = None  # of an update that failed
                continue  # as in torch, what has no gradient keeps its value and its states
            gradient = own.held.at(master.interval)
            tensor = master.tensor
            tensor.grad = gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)
    if isinstance(inner, SGD):
        _level_momentum(inner)
    inner.step()
    write_back(units)
    for unit in trainable:
        for master in unit.masters:
            master.tensor.grad = None
        unit.guard_masters()


def _level_momentum(inner: SGD) -> None:
    """Let tensors that begin late in a group have a momentum, which fused kernels want for all or none."""
    for group in inner.param_groups:
        active = [tensor for tensor in group["params"] if tensor.grad is not None]
        late = [tensor for tensor in active if inner.state.get(tensor, {}).get("momentum_buffer") is None]
        if not late or len(late) == len(active):
            continue
        if group.get("dampening"):
            group["fused"] = False
            continue
        for tensor in late:  # zeros give what the first step gives without dampening
            inner.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
