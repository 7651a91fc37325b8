"""One rank's figures of a bench while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Measured:
    """One rank's figures of each step, warm-up first; `trained` and `samples` include those of a resumed run.

    `window_ms` is `Clock.window_ms` of the measured steps, `batch_bytes` what lay ready for these on the device, and
    `batches_repeat_after` the number of steps after which batches came again. `count` is how much each loss weighs
    beside those of other ranks. `computed_ms` and `waited_ms` are means of a step.
    """

    warmup: int = 0
    trained: int = 0
    samples: int = 0
    step_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    window_ms: float | None = None
    batch_bytes: int = 0
    batches_repeat_after: int | None = None
    count: list[float] = field(default_factory=list)
    computed_ms: float | None = None
    waited_ms: float | None = None
