"""Hooks on modules' forwards that announce which units are about to be used.

A unit's own modules do, and the modules that hold its weights: those may be called by themselves, past the unit's
module. Where the first pass went through all of a unit's modules, the hooks inside them are removed, which would cost
more than the rest of zerokit in a model of small modules; guarded parameters still notice a call past the unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerokit.runtime.hooks import Hook, TracedHook, compiler_seen, is_compiled
from zerokit.runtime.model import Anatomy, announcers
from zerokit.runtime.unit import UnitState


class Announcements:
    """The hooks on the modules of `model`, but for itself; the inputs of those that are `casting` are cast."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, units: Sequence[UnitState], casting: set[nn.Module]
    ) -> None:
        self.called: set[nn.Module] = set()
        """Modules that have been called until `drop_spare`."""
        self._casting = casting
        self._announcers = announcers(model, anatomy, [unit.unit for unit in units])
        modules = dict(model.named_modules())
        self._users: dict[nn.Module, list[UnitState]] = {module: [] for module in casting - {model}}
        self._inside: dict[nn.Module, set[nn.Module]] = {}
        """For modules inside those of their only unit, the unit's modules."""
        for unit in units:
            scopes = {modules[scope] for scope in unit.unit.scopes}
            owners = dict.fromkeys(owner for p in unit.unit.parameters for owner in anatomy.owners[p.name])
            for module in scopes:
                self._users.setdefault(module, []).append(unit)
            for owner in owners:
                if owner is not model and unit not in self._users.setdefault(owner, []):
                    self._users[owner].append(unit)
                    self._inside[owner] = scopes
        for module, units in self._users.items():
            if len(units) > 1:
                self._inside.pop(module, None)
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._cast: TracedHook | None = None

    def install(
        self,
        walk: weakref.ref[Any],
        before: Callable[..., Any],
        after: Callable[..., Any],
        cast: Callable[..., Any],
    ) -> None:
        """Call `before(units, ...)` and `after(units, ...)` around each module's forward, or `cast` alone."""
        self._cast = TracedHook(walk, cast)
        for module, units in self._users.items():
            self._handles[module] = [
                module.register_forward_pre_hook(Hook(walk, before, units), with_kwargs=True, prepend=True),
                module.register_forward_hook(Hook(walk, after, units)),
            ]

    def lazy_units(self) -> list[int]:
        """The units whose uses were all announced by the modules called so far."""
        return [index for index, sets in self._announcers.items() if any(one <= self.called for one in sets)]

    def drop_spare(self) -> None:
        """Remove hooks inside units whose modules have all been called, and after-forward hooks of whole units."""
        for module, handles in self._handles.items():
            if len(handles) == 2 and not any(unit.comes_and_goes for unit in self._users[module]):
                handles.pop().remove()
        self._drop_inside(self.called)
        self._inside.clear()
        self.called.clear()

    def spare_compilers(self, model: nn.Module) -> None:
        """If parts of the model are compiled, remove all hooks inside units, because they would break graphs."""
        if compiler_seen() or any(map(is_compiled, model.modules())):
            self._drop_inside(set(self._users))

    def _drop_inside(self, called: set[nn.Module]) -> None:
        for module in [module for module, scopes in self._inside.items() if scopes and scopes <= called]:
            del self._inside[module]
            for handle in self._handles.pop(module):
                handle.remove()
            if module in self._casting and self._cast is not None:
                handle = module.register_forward_pre_hook(self._cast, with_kwargs=True, prepend=True)
                self._handles[module] = [handle]
