"""Whole weights to keep: masters in half precision, in the dtype that a file should have, and models given back."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import zerokit
from tests.support.on_ranks import on_ranks
from zerokit.errors import UsageError, ZerokitWarning
from zerokit.runtime.precision import DtypeName

RATE = 2e-5  # three steps of AdamW from 1.0 are lost in bfloat16
STAGES: list[Any] = [
    (0, None),
    (1, None),
    (2, None),
    (3, None),
    ((0, 3), (2, 2)),
    ((1, 3), (2, 2)),
    ((3, 3), (2, 2)),
]


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)) for _ in range(3)]
    blocks[2][0].weight = blocks[0][0].weight
    blocks[1].requires_grad_(False)
    return nn.Sequential(*blocks).to(dtype)


def _zero(model: nn.Module, precision: DtypeName = "bf16", **options: Any) -> zerokit.ZeroOptimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, precision=precision, params=trained, lr=RATE, weight_decay=0.0, **options
    )


def _train(model: nn.Module, optimizer: Any, steps: int = 3, seed: int = 0) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * seed + 10 * step + dist.get_rank())
        loss = model(torch.randn(4, 9, generator=generator)).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _masters(optimizer: zerokit.ZeroOptimizer) -> dict[str, tuple[int, Tensor]]:
    """This rank's part of the masters, by name and place in the flattened parameter."""
    found: dict[str, tuple[int, Tensor]] = {}
    for unit, master, _ in optimizer.runtime.masters():
        for part in unit.unit.slices:
            both = part.memory.intersection(master.interval)
            if both.numel:
                values = master.values.at(part.memory)
                found[part.parameter.name] = (both.start - part.offset, values.clone())
    return found


@on_ranks(4, STAGES)
def test_state_dict_is_the_masters_and_a_round_trip_keeps_them(given: tuple[Any, Any]) -> None:
    stage, mesh = given
    model = _model()
    optimizer = _zero(model, stage=stage, mesh=mesh)
    _train(model, optimizer)
    before = optimizer.traffic().bytes
    state = model.state_dict()
    norm = state["0.1.weight"]
    assert norm.dtype == torch.float32
    assert bool((norm != 1).all())
    assert bool(((norm - 1).abs() < 4 * RATE).all())
    assert state["2.0.weight"] is not None
    assert torch.equal(state["2.0.weight"], state["0.0.weight"])
    for name, (begin, values) in _masters(optimizer).items():
        assert torch.equal(state[name].flatten()[begin : begin + values.numel()], values), name
    with optimizer.gathered():  # where the model can run, it is what the model computes with
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state[name].bfloat16()), name
            assert model.state_dict()[name].dtype == torch.bfloat16
    assert optimizer.traffic().bytes == before

    for seed in range(8):  # right behind a step, whose updates others may still be reading
        _train(model, optimizer, 1, seed=seed)
        state = model.state_dict()
        with optimizer.gathered():
            assert all(torch.equal(p, state[name].bfloat16()) for name, p in model.named_parameters())

    other = _model()
    again = _zero(other, stage=stage, mesh=mesh)
    other.load_state_dict(state)
    loaded = other.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert _train(other, again, 1, seed=1) == _train(model, _fresh(optimizer), 1, seed=1)


def _fresh(optimizer: zerokit.ZeroOptimizer) -> zerokit.ZeroOptimizer:
    optimizer.state.clear()
    return optimizer


class _Overrides(nn.Linear):
    """Reads its weights in an override, a hook and an extra state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        return self.weight.detach().sum()

    def set_extra_state(self, state: Any) -> None:
        pass

    def save_pretrained(self) -> tuple[torch.dtype, dict[str, Tensor]]:
        return self.weight.dtype, self.state_dict()


@on_ranks(2, itertools.product((1, 3), (torch.float32, torch.bfloat16)))
def test_files_have_the_dtype_of_the_model_as_it_was_built(given: tuple[int, torch.dtype]) -> None:
    stage, built = given
    torch.manual_seed(0)
    model = _Overrides(9, 9).to(built)
    optimizer = _zero(model, stage=stage)
    _train(model, optimizer)
    state = model.state_dict()
    assert state["weight"].dtype == state["_extra_state"].dtype == torch.float32
    assert state["_extra_state"] == state["weight"].sum()
    dtype, saved = model.save_pretrained()
    assert dtype == saved["weight"].dtype == built
    assert torch.equal(saved["weight"], state["weight"].to(built))
    # One rank after the other, with values where they are asked for.
    found = optimizer.runtime.weights.in_turn(lambda: model.state_dict()["weight"].sum().item())
    assert found == saved["weight"].sum().item()
    pickled = io.BytesIO()
    optimizer.runtime.weights.in_turn(lambda: torch.save(model.state_dict(), pickled))
    pickled.seek(0)
    assert torch.equal(torch.load(pickled, weights_only=True)["weight"], saved["weight"])
    assert len(_train(model, optimizer)) == 3


@on_ranks(1)
def test_a_model_in_half_precision_becomes_fp32_with_a_word() -> None:
    with pytest.warns(ZerokitWarning, match=r"11 parameters in half precision .* become torch\.float32"):
        _zero(_model(torch.bfloat16), "fp32")


@on_ranks(2, itertools.product(("fp32", "bf16"), (0, 1, 2, 3)))
def test_a_released_model_is_plain_and_is_trained_anew(given: tuple[DtypeName, int]) -> None:
    precision, stage = given
    model, plain = _model(), _model()
    parameters = list(model.parameters())
    first = _zero(model, precision, stage=stage)
    _train(model, first)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    zerokit.release(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert {type(p) for p in parameters} == {nn.Parameter}
    assert {p.dtype for p in parameters} == {torch.float32}
    assert model.get_parameter("2.0.weight") is model.get_parameter("0.0.weight")
    assert all(torch.equal(value, state[name].float()) for name, value in model.state_dict().items())
    assert vars(model).keys() == vars(plain).keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(UsageError, match="was released"):
        first.step()
    with pytest.raises(UsageError, match="no ZeroOptimizer manages"):
        zerokit.release(model)

    # Gradients and another optimizer are those of a plain model with these weights.
    plain.load_state_dict(model.state_dict())
    for net in (model, plain):
        net(torch.ones(2, 9)).square().sum().backward()
    gradients = [[p.grad for p in net.parameters() if p.grad is not None] for net in (model, plain)]
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    model.zero_grad()
    plain.zero_grad()
    losses = [_train(net, _zero(net, "fp32", stage=3 - stage), seed=1) for net in (model, plain)]
    assert losses[0] == losses[1]
    del first
    zerokit.release(model)  # also once its optimizer is gone
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def _size(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@on_ranks(2, itertools.product((0, 2, 3), (False, True)))
def test_what_is_handed_out_is_a_storage_of_its_own(given: tuple[Any, bool]) -> None:
    """Parameters made of weights, and files of states: no unit lies in them, and tied names are one tensor."""
    stage, gathered = given
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage, precision="fp32", bucket_mb=16, lr=0.1
    )
    plain.load_state_dict(model.state_dict())
    with optimizer.gathered() if gathered else contextlib.nullcontext():
        assert _size(model.state_dict()) <= _size(plain.state_dict())
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_model(model, file.name)
            load_model(copy.deepcopy(plain), file.name)
        if stage == 3 and not gathered:
            weight = model[1].weight
            for use in (
                lambda: nn.Parameter(weight),
                lambda: nn.Embedding.from_pretrained(weight),
                lambda: weight.new_tensor(weight),
                weight.untyped_storage,
                lambda: np.asarray(weight),
                lambda: torch.tensor(weight),
                lambda: torch.asarray(obj=weight, copy=True),
                lambda: torch.Tensor(weight),
                lambda: torch.zeros(2).new_tensor(weight),
                lambda: torch.nested.nested_tensor([weight, weight]),
                lambda: nn.Linear(8, 8).load_state_dict({"weight": weight}),
                model[1].state_dict,
            ):
                with pytest.raises(zerokit.UsageError, match=r"1\.weight is divided over ranks"):
                    use()
            return
        assert np.array_equal(np.asarray(model[1].weight), plain[1].weight.detach().numpy())
        assert _size(model[1].state_dict()) == _size(plain[1].state_dict())
        assert _size({"w": model[1].weight.detach()}) == _size({"w": plain[1].weight.detach()})
        made: Any = nn.Parameter(model[1].weight)
        table = nn.Embedding.from_pretrained(model[1].weight)
        layer = nn.Linear(8, 8)
        layer.weight = nn.Parameter(model[1].weight)
        normed = nn.utils.parametrizations.weight_norm(layer)
    for parameter in (made, table.weight):
        assert type(parameter) is nn.Parameter
        assert parameter.equal(plain[1].weight)
    assert (made.is_leaf, made.requires_grad, table.weight.requires_grad) == (True, True, False)
    torch.testing.assert_close(normed.weight, plain[1].weight)
    made.sum().backward()
    assert made.grad.eq(1).all()
