"""Modules announce the units that they are about to use; hooks inside a unit go once nobody needs them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.recording import RecordingRoute, units_of_model
from zerokit.runtime.announce import Announcements


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Listener:
    """Notes which units are announced around which module."""

    def __init__(self, model: nn.Module, *casting: nn.Module) -> None:
        anatomy, storages = units_of_model(model, RecordingRoute(), 0)
        self.heard: list[tuple[str, list[str]]] = []
        self.cast: list[nn.Module] = []
        self.modules = Announcements(model, anatomy, storages, set(casting))
        self.modules.install(weakref.ref(self), Listener.before, Listener.after, Listener.note_cast)

    def before(self, units: list[Any], module: nn.Module, args: Any, kwargs: Any) -> None:
        self.modules.called.add(module)
        self.heard.append(("before", [unit.unit.name for unit in units]))

    def after(self, units: list[Any], module: nn.Module, args: Any, output: Any) -> None:
        self.heard.append(("after", [unit.unit.name for unit in units]))

    def note_cast(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.cast.append(module)

    def take(self) -> list[tuple[str, list[str]]]:
        heard, self.heard = self.heard, []
        return heard


def first(kind: str) -> tuple[str, list[str]]:
    return kind, ["blocks.0.inner.weight .. blocks.0.inner.bias"]


def test_a_units_module_and_the_one_that_holds_its_weights_announce_it() -> None:
    model = Model()
    listener = Listener(model)
    model(torch.ones(1, 4))
    heard = listener.take()
    assert len(heard) == 2 + 4 * 2
    assert heard[2:6] == [first("before"), first("before"), first("after"), first("after")]
    model.blocks[0].inner(torch.ones(1, 4))  # type: ignore[operator]
    assert listener.take() == [first("before"), first("after")]


def test_after_a_pass_through_the_units_modules_their_insides_are_silent() -> None:
    model = Model()
    listener = Listener(model)
    model(torch.ones(1, 4))
    assert sorted(listener.modules.lazy_units()) == [0, 1, 2, 3]
    listener.modules.drop_spare(after=False)
    listener.take()
    assert listener.modules.called == set()
    model(torch.ones(1, 4))
    assert [one for one in listener.take() if one in (first("before"), first("after"))] == [
        first("before"),
        first("after"),
    ]


def test_hooks_are_dropped_once() -> None:
    model = Model()
    listener = Listener(model)
    for _ in range(3):
        model(torch.ones(1, 4))
        listener.modules.drop_spare(after=False)
    listener.take()
    model(torch.ones(1, 4))
    assert len(listener.take()) == 2 + 2 * 2


def test_the_insides_of_a_unit_that_was_passed_by_keep_their_hooks() -> None:
    model = Model()
    listener = Listener(model)
    model.blocks[0].inner(torch.ones(1, 4))  # type: ignore[operator]
    assert listener.modules.lazy_units() == [2]  # all of its weights lie there
    listener.modules.drop_spare(after=False)
    listener.take()
    model.blocks[0].inner(torch.ones(1, 4))  # type: ignore[operator]
    assert listener.take() == [first("before"), first("after")]


def test_a_module_whose_hooks_go_still_casts_its_inputs() -> None:
    model = Model()
    inner = model.blocks[0].inner
    assert isinstance(inner, nn.Linear)
    listener = Listener(model, inner)
    model(torch.ones(1, 4))
    assert listener.cast == []  # the full hooks do it
    listener.modules.drop_spare(after=False)
    model(torch.ones(1, 4))
    assert listener.cast == [inner]


def test_no_hook_is_left_and_a_listener_that_is_gone_hears_nothing() -> None:
    model = Model()
    listener = Listener(model)
    heard = listener.heard
    modules = listener.modules
    del listener
    model(torch.ones(1, 4))
    assert heard == []
    modules.remove()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
