"""Version counters of tensors, by which autograd notices changes in place, set to what they shall be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_set_version: Any = torch._C._autograd._unsafe_set_version_counter


def _sets_several() -> bool:
    try:
        _set_version((), ())
    except TypeError:  # torch 2.6 takes one tensor and one number
        return False
    return True


_SETS_SEVERAL = _sets_several()


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the counter of each tensor; as many versions as tensors."""
    if _SETS_SEVERAL:
        _set_version(tuple(tensors), tuple(versions))
    else:
        for tensor, version in zip(tensors, versions, strict=True):
            _set_version(tensor, version)
