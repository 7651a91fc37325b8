"""All patterns; importing the modules registers them."""

from __future__ import annotations

from tests.runtime.patterns import (
    autograd,
    changes,
    functional,
    gradients,
    half,
    hooks,
    islands,
    library,
    loops,
    momentum,
    objects,
    passing,
    ranks,
    recipes,
    recomputation,
    several,
    states,
    structure,
    threads,
    weights,
)
from tests.runtime.patterns.harness import PATTERNS

_MODULES = (
    loops,
    momentum,
    weights,
    changes,
    gradients,
    passing,
    structure,
    library,
    autograd,
    hooks,
    recomputation,
    functional,
    several,
    recipes,
    threads,
    states,
    ranks,
    half,
    objects,
    islands,
)

SUBJECTS = {
    module.__name__.rpartition(".")[2]: (module.__doc__ or "").strip().rstrip(".") for module in _MODULES
}
"""Headings of the table, by the module's name."""

__all__ = ["PATTERNS", "SUBJECTS"]
