"""torch's functions that read a tensor's elements without showing it to `__torch_function__`.

At stage 3 a freed parameter reads as nan, so that a copy by `torch.tensor(weight)` would be one of nan. From the first
such optimizer on these functions ask a guarded parameter first, as all others do, and are torch's own in all else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokit.runtime.guard import Guarded
from zerokit.runtime.torch_internals import functions_in_scripts

_WRAPPED = "_zerokit_asks"  # the attribute of a function that asks


def guard_readers() -> None:
    """Let them ask; once in a process."""
    if hasattr(torch.tensor, _WRAPPED):
        return
    scripted = functions_in_scripts()
    for holder, name in (
        (torch, "tensor"),
        (torch, "asarray"),
        (torch.nested, "nested_tensor"),
        (torch.nested, "as_nested_tensor"),
        (Tensor, "new_tensor"),
    ):
        plain: Any = getattr(holder, name)
        asking = _asking(plain)
        if not isinstance(holder, type):
            asking.__module__, asking.__qualname__ = holder.__name__, name  # by which it is pickled
        setattr(holder, name, asking)
        if id(plain) in scripted:  # torch.jit.script knows functions by identity
            scripted[id(asking)] = scripted[id(plain)]
    setattr(Tensor, "__new__", staticmethod(_asking(Tensor.__new__)))  # noqa: B010 - `torch.Tensor(weight)`


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def reader(*args: Any, **kwargs: Any) -> Any:
        for given in (*args[:2], *kwargs.values()):
            several = isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], Tensor)
            for each in given if several else (given,):
                if isinstance(each, Guarded):
                    each.require_readable()
        return plain(*args, **kwargs)

    vars(reader)[_WRAPPED] = True
    return reader
