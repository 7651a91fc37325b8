"""What becomes of a step whose gradients are inf or nan on some rank (`on_nonfinite`), and what is said of it.

On hosts the ranks' agreement before a step carries the answer. Where the host runs ahead of a device, a fused kernel
takes it on the device, as it takes that of `torch.amp.GradScaler`, and the host counts a step later.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from torch.optim import Optimizer

from zerokit.errors import NonFiniteError, UsageError, ZerokitWarning
from zerokit.runtime.inner import parts_of
from zerokit.runtime.torch_internals import leaves_out_steps

OnNonfinite = Literal["skip", "raise", "ignore"]


def require_choice(given: object) -> None:
    """Raise `UsageError` for what is none of the three."""
    if given not in get_args(OnNonfinite):
        raise UsageError(
            f"on_nonfinite={given!r}: expected 'skip', which leaves out steps whose gradients are inf or nan, 'raise' "
            "for an error, or 'ignore' to write them into the weights"
        )


def warn_of_waiting(inner: Optimizer) -> None:
    """Say that this optimizer makes the host wait for the device."""
    names = [type(one).__name__ for one in parts_of(inner) if not leaves_out_steps(one)]
    warnings.warn(
        f"this {' and '.join(names)} cannot leave out a step on the device, as fused Adam, AdamW, Adagrad and SGD "
        "without dampening do, so the host waits for the device once a step to know whether gradients are finite: "
        "choose one of these, or on_nonfinite='ignore'",
        ZerokitWarning,
        stacklevel=4,
    )


def warn_of_skip() -> None:
    """Say that a step was left out, for the first time in a training."""
    warnings.warn(
        "gradients are inf or nan on some rank, so this step was skipped: weights and states stay as they were. "
        "optimizer.skipped_steps counts such steps from now on. Look at the loss and the data; on_nonfinite='raise' "
        "makes an error of it",
        ZerokitWarning,
        stacklevel=5,
    )


def refuse_step() -> NonFiniteError:
    """The error of `on_nonfinite="raise"`."""
    return NonFiniteError(
        "gradients are inf or nan on some rank, and nothing was updated: look at the loss and the data. zero_grad() "
        "and a new pass go on; on_nonfinite='skip' leaves such steps out"
    )
