"""Weights that the user changes in place are what is saved, stepped and averaged next, wherever they were changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.devices import lagging
from tests.support.distributed import run_ranks
from tests.support.saving import in_turn
from tests.support.training import whole_weights
from zerokit.placement import stage_of

Ways = dict[str, Callable[[Iterable[nn.Parameter]], Any]]

HALVE: Ways = {
    "mul_": lambda parameters: [p.mul_(0.5) for p in parameters],
    "data": lambda parameters: [p.data.mul_(0.5) for p in parameters],
    "foreach": lambda parameters: torch._foreach_mul_(list(parameters), 0.5),
}


def _trained(stage: int, precision: str) -> tuple[nn.Module, zerokit.ZeroOptimizer, dict[str, Tensor]]:
    """A model after a step, one layer of it frozen, and half of its weights: what a change must leave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10), nn.Linear(10, 10))
    model[1].requires_grad_(False)
    zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision=precision, lr=0.1)
    zero.backward(model(torch.ones(2, 10)).float().sum())
    zero.step()
    zero.zero_grad()
    return model, zero, {name: value * 0.5 for name, value in whole_weights(model).items()}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name].to(value.dtype), value) for name, value in expected.items())


def _without_frozen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith("1.")}


def _saved(directory: str, zero: zerokit.ZeroOptimizer, *, weights_only: bool) -> dict[str, Tensor]:
    path = zerokit.save(directory, zero, step=1, overwrite=True, weights_only=weights_only)
    dist.barrier()
    checkpoint = zerokit.Checkpoint(path)
    found = {
        name: torch.as_tensor(checkpoint.read("param" if name.startswith("1.") else "master", name))
        for name in checkpoint.names
    }
    dist.barrier()
    return found


CHANGED = [
    (2, "fp32", False, "mul_", False),
    (2, "fp32", True, "data", False),
    (2, "bf16", False, "foreach", False),
    (2, "bf16", True, "mul_", False),
    # At stage 3 there are no weights to change outside `gathered()`.
    (3, "fp32", True, "mul_", False),
    (3, "bf16", True, "data", False),
    (3, "bf16", True, "foreach", False),
    # As on devices: a gathered unit's memory is another one than the shard's, in fp32, too.
    (3, "fp32", True, "mul_", True),
    (3, "bf16", True, "mul_", True),
]


def _change_and_save(directory: str) -> list[str]:
    """The cases in which something else than the changed weights was taken."""
    wrong = []
    for stage, precision, gathered, way, elsewhere in CHANGED:
        with lagging("cpu") if elsewhere else contextlib.nullcontext():
            model, zero, expected = _trained(stage, precision)
            with zero.gathered() if gathered else contextlib.nullcontext():
                with torch.no_grad():
                    HALVE[way](model.parameters())
                # Each of them first: what one of them takes over, the next one finds.
                own = copy.deepcopy(dict(zero.state_dict())) if way == "mul_" else None
                whole = _saved(directory, zero, weights_only=False)
                weights = _saved(directory, zero, weights_only=True)
            found = {"save": _equal(whole, expected), "weights": _equal(weights, expected)}
            found["kept"] = _equal(whole_weights(model), expected)
            if own is not None:
                zero.backward(model(torch.ones(2, 10)).float().sum())
                zero.step()
                zero.load_state_dict(own)
                found["state_dict"] = _equal(whole_weights(model), _without_frozen(expected))
        case = f"{stage} {precision} {gathered} {way} {elsewhere}"
        wrong += [f"{case}: {name}" for name, good in found.items() if not good]
    return wrong


def _go_on_inside(stage: int, precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A change, an average and a step, all inside `gathered()`; returns the weights, and the average of them."""
    model, zero, _ = _trained(stage, precision)
    ema = zerokit.Ema(zero, decay=0.5)
    with zero.gathered():
        with torch.no_grad():
            HALVE["mul_"](model.parameters())
        ema.update()
        zero.backward(model(torch.ones(2, 10)).float().sum())
        with torch.no_grad():
            HALVE["mul_"](model.parameters())
        zero.step()
    after = {name: value.clone() for name, value in whole_weights(model).items()}
    with ema.applied():
        return after, {name: value.clone() for name, value in whole_weights(model).items()}


def _all_stages(folder: str) -> list[str]:
    """A step and an average inside `gathered()` begin with the changed weights."""
    wrong = []
    for precision in ("fp32", "bf16"):
        weights, averages = _go_on_inside(0, precision)
        _, _, halves = _trained(0, precision)
        assert _equal(averages, _without_frozen(halves))
        for stage in (1, 3) if precision == "fp32" else (2, 3):
            found = _go_on_inside(stage, precision)
            if not (_equal(found[0], weights) and _equal(found[1], averages)):
                wrong.append(f"stage {stage}, {precision}")
    return wrong


def test_what_is_saved_stepped_and_averaged_is_what_was_changed(tmp_path: Path) -> None:
    works = [_change_and_save, _all_stages]
    assert run_ranks(2, in_turn, works, str(tmp_path)) == [[[], []]] * 2
