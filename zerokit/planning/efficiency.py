"""A device's speed in products and memory, from a table or a record. Standard library only.

Products take the time of their FLOPs at a share of the peak, and that of reading and writing their operands: small
and thin ones are slower. Attention's products (batched, with a head's width inside) have shares of their own, since its
kernels keep less of a device busy. Everything else moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerokit.errors import UsageError
from zerokit.planning.hardware import Device
from zerokit.planning.work import Product, Work

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shares:
    """The shares of its peaks that a device reaches, the same for every model.

    Attributes:
        products: of the peak FLOP/s, by large products.
        attention: by attention's products in forward, masked halves left out.
        attention_backward: the same in backward, whose products include the scores that its kernels repeat.
        memory: of the memory's bandwidth, by operations that move bytes.
        communication: of all speed, what a collective in flight takes: multiprocessors, memory, gaps in the overlap.
    """

    products: float
    attention: float
    attention_backward: float
    memory: float
    communication: float


LAUNCH_S = 6e-6
"""Host time to launch one operation of eager PyTorch, autograd included."""

# Fitted by `python -m benchmarks.plan_rows --calibrate` to published rows of one node alone; the rows and
# their sources are in benchmarks/plan_rows.json.
SHARES: Mapping[str, Shares] = {
    "a100-40": Shares(0.735, 0.374, 0.29, 0.78, 0.381),
    "a100-80": Shares(0.826, 0.459, 0.27, 0.567, 0.247),
    "h100-80": Shares(0.677, 0.231, 0.159, 0.637, 0.48),
    "h100-96-500w": Shares(0.82, 0.231, 0.159, 0.637, 0.48),
    "h200": Shares(0.82, 0.534, 0.318, 0.637, 0.48),
}


@dataclass(frozen=True)
class Efficiency:
    """Seconds of work on one rank, alone on its device.

    Attributes:
        flops: FLOP/s that large products reach.
        attention: FLOP/s of attention's products in forward, and in backward.
        memory_bytes_per_s: what operations that move bytes reach.
        element_bytes: of the operands of products.
        launch_s: host time an operation; 0 where the host is the device.
        scale: forward and backward take this many times what the figures above give.
        communication: the part of all speed that a collective in flight takes.
        moving: moving bytes outside of forward and backward takes this many times what the figures give.
        page_s: what the first write to a page of fresh memory costs; 0 where no step gets any.
    """

    flops: float
    attention: tuple[float, float]
    memory_bytes_per_s: float
    element_bytes: int
    launch_s: float = 0.0
    scale: float = 1.0
    communication: float = 0.0
    moving: float = 1.0
    page_s: float = 0.0

    def seconds(self, work: Work, *, backward: bool = False) -> float:
        """The time of `work`, or the host's launch time if that is longer."""
        return max(sum(self._parts(work, backward=backward)), work.kernels * self.launch_s) * self.scale

    def _parts(self, work: Work, *, backward: bool) -> tuple[float, float]:
        """Seconds of multiplying, and of moving bytes."""
        multiplied, moved = 0.0, float(work.moved_bytes)
        for product in work.products:
            if is_attention(product):
                multiplied += product.flops / self.attention[backward]
            else:
                multiplied += product.flops / self.flops
                moved += self.element_bytes * (
                    product.m * product.k + product.k * product.n + product.m * product.n
                )
        return multiplied, moved / self.memory_bytes_per_s

    def moving_seconds(self, moved_bytes: float) -> float:
        """Time to read and write so many bytes."""
        return moved_bytes / self.memory_bytes_per_s * self.moving

    def limit(self, works: Iterable[Work]) -> str:
        """The limit of `work`: "compute" (products), "memory" (moving bytes) or "host" (launching)."""
        seconds = {"compute": 0.0, "memory": 0.0, "host": 0.0}
        for work in works:
            multiplied, moved = self._parts(work, backward=False)
            launched = work.kernels * self.launch_s
            longest = (
                "host" if launched > multiplied + moved else "compute" if multiplied > moved else "memory"
            )
            seconds[longest] += max(launched, multiplied + moved)
        return max(seconds, key=seconds.__getitem__)


def is_attention(product: Product) -> bool:
    """Whether this is one of attention's products: batched over heads."""
    return product.count > 1


def of_device(device: Device, dtype: str, otherwise: Shares | None = None) -> Efficiency:
    """The table's entry for a device, or else with the shares `otherwise`, which a record of the device then scales.

    Raises `UsageError` for a device or dtype that the table lacks.
    """
    shares, peak = SHARES.get(device.name, otherwise), device.flops.get(dtype)
    if shares is None:
        raise UsageError(
            f"nothing has been measured on device {device.name!r}: give a record of `zerokit bench` on one with --from "
            f"(measured are {', '.join(SHARES)})"
        )
    if peak is None:
        raise UsageError(
            f"device {device.name!r} has no peak for {dtype}: choose one of {', '.join(device.flops)}"
        )
    return with_shares(device, shares, dtype)


def with_shares(device: Device, shares: Shares, dtype: str) -> Efficiency:
    """A device that reaches these shares of its peaks."""
    peak = device.flops[dtype]
    return Efficiency(
        peak * shares.products,
        (peak * shares.attention, peak * shares.attention_backward),
        device.memory_bytes_per_s * shares.memory,
        ELEMENT_BYTES[dtype],
        LAUNCH_S,
        communication=shares.communication,
    )
