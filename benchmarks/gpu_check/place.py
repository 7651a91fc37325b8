"""Where a part of the check runs, and what a part is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """The device of a part's process, which has no process group yet; on a host sizes are `small`.

    Attributes:
        device: `cuda:0`, or `cpu` where a host tries the part.
        small: whether the sizes are those of a test: the part has to end within seconds.
        out: the folder of the check, for traces.
    """

    device: torch.device
    small: bool
    out: Path


Part = Callable[[Place], dict[str, Any]]
"""Returns what it found as JSON's values; raises where something is wrong."""
