"""A wire that is not there: one rank of several waits on its side streams for as long as the others' bytes would take.

The bytes that a collective brings to this rank pass at a rate. On a device a kernel that only spins takes that time on
the stream of the collective; on a host none passes. Gathered pieces of others are copies of this rank's: finite values,
and the writes of a gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from benchmarks.gpu_check.engines import Dress
from zerokit.bench.engines.trainer import Trainer
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.collectives import Kind
from zerokit.runtime.collectives.legs import Count

NVLINK_BYTES_PER_S = 340e9
"""Bus bandwidth of all-gathers and reduce-scatters of large buffers over eight H100s."""


class Wire:
    """What passes for one engine's rank; `cycles_per_s` None passes no time."""

    def __init__(self, cycles_per_s: float | None, bytes_per_s: float = NVLINK_BYTES_PER_S) -> None:
        self._cycles_per_byte = None if cycles_per_s is None else cycles_per_s / bytes_per_s
        self._passed = 0

    def pass_bytes(self, nbytes: int) -> None:
        """Let so many bytes arrive, on the current stream."""
        self._passed += nbytes
        if self._cycles_per_byte is not None:
            torch.cuda._sleep(round(nbytes * self._cycles_per_byte))

    def taken(self) -> int:
        """The bytes that have arrived since the last call."""
        passed, self._passed = self._passed, 0
        return passed


def repeat_first(rows: Tensor) -> None:
    """Fill the other ranks' pieces [ranks, elements of each] with rank 0's."""
    with torch.no_grad():
        rows[1:].copy_(rows[:1].expand_as(rows[1:]))


@dataclass(frozen=True)
class _Flight:
    """A collective of zerokit's: its bytes arrive behind its own work, on its stream."""

    arrive: Callable[[], None]

    def begin(self) -> None:
        pass

    def end(self) -> None:
        self.arrive()


class OnWire:
    """An `Observer` of zerokit's collectives, which lets what they bring pass over a wire. For rank 0 of one axis."""

    def __init__(self, zero: ZeroOptimizer, wire: Wire) -> None:
        self._zero, self._wire = zero, wire

    def flies(self, kind: Kind, unit: int, counts: Sequence[Count]) -> _Flight:
        received = sum(count.received for count in counts)

        def arrive() -> None:
            if kind is Kind.ALL_GATHER:
                whole = self._zero.runtime.units[unit].whole
                repeat_first(whole.rows(whole.unit.cut))
            self._wire.pass_bytes(received)

        return _Flight(arrive)

    def waits(self, what: str) -> Callable[[], None]:
        return lambda: None

    def around(self, wait: Callable[[], None]) -> None:
        wait()

    def taken(self) -> None:
        pass


class _Allocates:
    """As FSDP2's own collectives allocate."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rows = output_tensor.view(group.size(), -1)
        repeat_first(rows)
        self._wire.pass_bytes(rows[1:].nbytes)


class _Scatter(_Allocates, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        output_tensor.copy_(rows[0])
        self._wire.pass_bytes(rows[1:].nbytes)


@contextlib.contextmanager
def wires(cycles_per_s: float | None) -> Iterator[Dress]:
    """Inside, what this gives puts the collectives of zerokit's and FSDP2's trainers on a wire each."""
    with contextlib.ExitStack() as stack:

        def dress(trainer: Trainer) -> Callable[[], int]:
            wire = Wire(cycles_per_s)
            if trainer.zero is not None:
                stack.enter_context(trainer.zero.runtime.collectives.observed(OnWire(trainer.zero, wire)))
            for module in trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(_Gather(wire))
                    module.set_custom_reduce_scatter(_Scatter(wire))
            return wire.taken

        yield dress


def cycles_per_second(device: torch.device) -> float | None:
    """The cycles of `torch.cuda._sleep` in a second of a device at work, whose clock a load changes; None on a host."""
    if device.type != "cuda":
        return None
    side = torch.randn(8192, 8192, device=device).bfloat16()
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(100):  # some 0.2 s
        side @ side
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    took_ms: float = start.elapsed_time(end)
    return cycles / took_ms * 1e3
