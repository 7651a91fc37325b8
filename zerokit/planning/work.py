"""The work of one micro-batch by unit, from which the time of a step is computed.

A model that has been looked at once yields one `ModelWork`. It knows nothing of devices, links and stages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one shape, [m, k] by [k, n]: 2·m·n·k·count FLOPs. Batched ones count once a batch element."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """The FLOPs of all products."""
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class Work:
    """The work in one part of a pass: products, and the bytes that all other operations read and write."""

    products: tuple[Product, ...] = ()
    moved_bytes: int = 0
    """Bytes read and written by operations other than products (norms, activations, residuals, loss)."""
    kernels: int = 0
    """Operations launched, products included."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work between the moment a unit's parameters are needed and the moment the next unit's are.

    `backward` excludes the forward that recomputation repeats; that is `recomputed`.
    """

    unit: int
    """Index in `Layout.units`."""
    forward: Work
    backward: Work = Work()
    recomputed: Work = Work()

    @property
    def parts(self) -> tuple[Work, Work, Work]:
        """Work in forward, in backward, and in recomputation."""
        return self.forward, self.backward, self.recomputed


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One micro-batch of a model: `units` in the order of the forward pass; a unit used twice stands twice."""

    units: tuple[UnitWork, ...]
    tokens: int
    """Tokens (or samples, for models without tokens) of the micro-batch."""
    fresh_bytes: int = 0
    """What the system hands out for activations where freed memory goes back to it in every pass (stage 3 on hosts)."""


MATRICES = 0
"""The optimizer group of the matrices that Muon trains; AdamW trains the other one."""

_STEPS, _KERNELS = 5, 40
"""Iterations of Newton and Schulz in `torch.optim.Muon`, and the operations that it launches for a matrix."""


def newton_schulz(shape: tuple[int, ...], moved_bytes: int = 0) -> Work:
    """Muon's update of a matrix, which also reads and writes so many bytes: 5·(4m²n + 2m³) FLOPs with m ≤ n."""
    m, n = sorted(shape)
    return Work((Product(m, m, n), Product(m, m, m), Product(m, n, m)) * _STEPS, moved_bytes, _KERNELS)
