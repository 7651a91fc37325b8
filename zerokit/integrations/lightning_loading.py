"""`Net.load_from_checkpoint` of a directory that `ZeroStrategy` has saved."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zerokit.checkpoint.plan import read_extra
from zerokit.checkpoint.reader import Checkpoint
from zerokit.errors import CheckpointError
from zerokit.integrations.pretrained import whole_weights


def read_sharded(package: str) -> None:
    """Let `Net.load_from_checkpoint` read directories of `ZeroStrategy` in this process; files are Lightning's."""
    saving: Any = import_module(f"{package}.core.saving")
    plain = saving.pl_load

    def load_any(path: Any, map_location: Any = None, **options: Any) -> Any:
        if not isinstance(path, str | Path) or not Path(path).is_dir():
            return plain(path, map_location=map_location, **options)
        checkpoint = Checkpoint(Path(path))
        weights = whole_weights(checkpoint)
        if isinstance(map_location, str | torch.device):
            weights = {name: value.to(map_location) for name, value in weights.items()}
        return {
            **of_lightning(path, read_extra(checkpoint, rank=0, weights_only=True)["user"]),
            "state_dict": weights,
        }

    saving.pl_load = load_any


def of_lightning(path: str | Path, extra: Any) -> dict[str, Any]:
    """What Lightning has saved in `extra`."""
    if not isinstance(extra, dict) or "loops" not in extra:
        raise CheckpointError(
            f"{path} was not saved by Lightning: take its weights with zerokit consolidate, or its whole state "
            "with zerokit.load(path, trainer.strategy.zero_optimizer) in on_train_start"
        )
    return extra
