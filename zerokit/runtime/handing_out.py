"""Tensors over a parameter's memory for the user: each in a storage of its own, so that files hold it alone.

A parameter is a view of its unit's storage. What saves storages (torch.save) would write the whole unit for it, and
what compares them (safetensors) would take the unit's parameters for tied ones.
"""

from __future__ import annotations

import sys

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zerokit.runtime.torch_internals import LOAD_OF_MODULE, NEW_PARAMETER, STATE_OF_MODULE


def called_by_parameter(depth: int = 2) -> bool:
    """Whether the caller's caller is `nn.Parameter(...)`, which wants its argument's class back from `detach()`."""
    return sys._getframe(depth).f_code is NEW_PARAMETER


def called_by_state_dict(depth: int = 2) -> bool:
    """Whether the caller's caller is a module that fills a state dict."""
    return sys._getframe(depth).f_code is STATE_OF_MODULE


def called_by_load(depth: int = 3) -> bool:
    """Whether a module that loads a state dict has called what `uncompiled` wraps, before it catches errors."""
    return sys._getframe(depth).f_code is LOAD_OF_MODULE


def apart(values: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own; `values` lives as long, in memory that must stay."""
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    try:
        return from_dlpack(values)
    except (BufferError, RuntimeError):  # no such dtype there, such as float8 of a frozen base
        return values
