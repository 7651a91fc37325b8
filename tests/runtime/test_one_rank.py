# mypy: disable-error-code="no-untyped-call"
"""One rank alone changes weights or gradients, loads, or has values at the start: all ranks get them, or are told."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from zerokit.runtime.changes import checksum
from zerokit.runtime.precision import DtypeName

STAGES = (0, 1, 2, 3)
WHERE: list[tuple[Any, DtypeName]] = [
    (stage, precision) for precision in ("fp32", "bf16") for stage in STAGES
]
MESHES: list[tuple[Any, DtypeName]] = [((0, 3), "bf16"), ((1, 3), "fp32"), ((2, 2), "bf16"), ((0, 0), "fp32")]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_shows_every_change_and_change_of_places(dtype: torch.dtype) -> None:
    values = torch.arange(2_000_000).remainder(251).to(dtype)
    total = checksum(values).item()
    assert total == checksum(values.clone()).item()
    for first, second in ((0, 1), (3, 1_500_000)):
        changed = values.clone()
        changed[[first, second]] = values[[second, first]]
        assert torch.equal(values, changed) == (checksum(changed).item() == total)
    assert checksum(torch.zeros(0, dtype=dtype)).item() == 0
    assert checksum(torch.ones((), dtype=dtype)).item() != 0


def _build(where: tuple[Any, DtypeName], lr: float = 0.0, seed: int = 0) -> tuple[Net, zerokit.ZeroOptimizer]:
    stage, precision = where
    model = Net(seed)
    mesh: Any = (2, 2) if isinstance(stage, tuple) else None
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage, mesh=mesh, precision=precision, bucket_mb=1e-4, lr=lr
    )
    _step(model, optimizer)
    return model, optimizer


def _backward(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.arange(4) + dist.get_rank()).float().square().mean())


def _step(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.zero_grad()
    _backward(model, optimizer)
    optimizer.step()


def _elements(optimizer: zerokit.ZeroOptimizer) -> dict[str, Tensor]:
    """Each parameter by its masters, or frozen memory, on all ranks, which must agree where several have an element."""
    mine = [(u.index, m.interval.start, m.tensor.detach().float()) for u, m, _ in optimizer.runtime.masters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    wholes = {u.index: torch.full((u.unit.numel,), torch.nan) for u in optimizer.runtime.units}
    for index, start, values in (piece for rank in everyone for piece in rank):
        there = wholes[index][start : start + values.numel()]
        assert bool((there.isnan() | (there == values)).all()), f"ranks differ in unit {index}"
        there.copy_(values)
    return {
        s.parameter.name: wholes[u.index][s.offset : s.offset + s.parameter.numel].view(s.parameter.shape)
        for u in optimizer.runtime.units
        for s in u.unit.slices
    }


def _shown(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> dict[str, Tensor]:
    """The whole parameters, equal on all ranks."""
    with optimizer.gathered():
        values = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    assert all(torch.equal(theirs[name], value) for theirs in everyone for name, value in values.items())
    return values


def _by_value(model: Net) -> None:
    with torch.no_grad():
        model.out.weight.fill_(7.0)


def _by_data(model: Net) -> None:
    model.words.weight.data.mul_(2.0)


def _by_load(model: Net) -> None:
    model.load_state_dict(Net(seed=5).state_dict())


def _before_a_forward(model: Net) -> None:
    with torch.no_grad():
        model.out.weight.fill_(7.0)


CHANGES: list[Callable[[Net], None]] = [_by_value, _by_data, _by_load, _before_a_forward]


def _run_inside(model: Net, change: Callable[[Net], None]) -> None:
    if change is _before_a_forward:
        with torch.no_grad():
            model.eval()(torch.arange(4))
        model.train()


def _change_on_rank_0(
    model: Net, optimizer: zerokit.ZeroOptimizer, change: Callable[[Net], None], *, fail: bool = False
) -> None:
    with optimizer.gathered():
        if dist.get_rank() == 0:
            change(model)
        _run_inside(model, change)
        if fail:
            raise KeyError


def _only_one_rank_changes(where: tuple[Any, DtypeName]) -> None:
    for change in CHANGES:
        for source in (0, 1):
            model, optimizer = _build(where)
            before = _elements(optimizer)
            with optimizer.gathered(source):
                if dist.get_rank() == source:
                    change(model)
                _run_inside(model, change)
            expected = Net(seed=5).state_dict() if change is _by_load else dict(before)
            if change is _by_data:
                expected["words.weight"] = (
                    Net().words.weight.detach().to(getattr(torch, _COMPUTE[where[1]])) * 2.0
                )
            elif change is not _by_load:
                expected["out.weight"] = torch.full((3, 8), 7.0)
            for name, value in _elements(optimizer).items():
                assert torch.equal(value, expected[name].float()), (change.__name__, source, name)
            _step(model, optimizer)
            _shown(model, optimizer)

        model, optimizer = _build(where)
        with pytest.raises(zerokit.UsageError, match=r"gathered\(source=0\)"):
            _change_on_rank_0(model, optimizer, change)
        _elements(optimizer)
        _shown(model, optimizer)
        _step(model, optimizer)


_COMPUTE = {"fp32": "float32", "bf16": "bfloat16"}


@on_ranks(2, WHERE)
def test_one_ranks_changes_reach_all_with_source_and_are_told_without(where: tuple[Any, DtypeName]) -> None:
    """Wider values reach the masters to the bit; after the error all ranks have rank 0's."""
    _only_one_rank_changes(where)


@on_ranks(4, MESHES)
def test_one_ranks_changes_on_a_mesh(where: tuple[Any, DtypeName]) -> None:
    _only_one_rank_changes(where)


@on_ranks(2, WHERE)
def test_buffers_and_frozen_weights_follow_the_source(where: tuple[Any, DtypeName]) -> None:
    torch.manual_seed(0)
    model = Net()
    model.words.weight.requires_grad_(False)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=where[0], precision=where[1], lr=0.1)
    with optimizer.gathered(source=1), torch.no_grad():
        if dist.get_rank() == 1:
            model.words.weight.fill_(2.0)
            model.get_buffer("blocks.0.1.running_mean").fill_(3.0)
            model.blocks[1][1].running_var = torch.full((8,), 4.0)  # type: ignore[index]
    assert bool((_shown(model, optimizer)["words.weight"] == 2.0).all())
    assert model.get_buffer("blocks.0.1.running_mean").tolist() == [3.0] * 8
    assert model.get_buffer("blocks.1.1.running_var").tolist() == [4.0] * 8


@on_ranks(2, WHERE)
def test_gradients_of_one_rank(where: tuple[Any, DtypeName]) -> None:
    for source in (0, 1, None):
        model, optimizer = _build(where, lr=1.0)
        optimizer.zero_grad()
        before = _elements(optimizer)
        _backward(model, optimizer)
        told = (
            contextlib.nullcontext()
            if source is not None
            else pytest.raises(zerokit.UsageError, match="source=0")
        )
        with told, optimizer.gathered_gradients(source):
            if dist.get_rank() == (source or 0):
                assert model.out.bias.grad is not None
                model.out.bias.grad.fill_(0.5)
                model.words.weight.grad = None
        optimizer.step()
        after = _elements(optimizer)
        changed = torch.allclose(after["out.bias"], before["out.bias"] - 0.5)
        assert changed == (source is not None)
        assert torch.equal(after["words.weight"], before["words.weight"]) == (source is not None)
        _shown(model, optimizer)


@on_ranks(2, WHERE)
def test_changes_made_alike_are_kept_and_steps_wait_for_the_source(where: tuple[Any, DtypeName]) -> None:
    model, optimizer = _build(where)
    before = _elements(optimizer)
    with torch.no_grad(), optimizer.gathered():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.load_state_dict(Net(seed=5).state_dict())
    assert all(torch.equal(v, Net(seed=5).get_parameter(n)) for n, v in _elements(optimizer).items())
    assert any(not torch.equal(v, before[n]) for n, v in _elements(optimizer).items())
    _backward(model, optimizer)
    with optimizer.gathered(source=0):
        with pytest.raises(zerokit.UsageError, match="take effect at its end"):
            optimizer.step()
        if dist.get_rank() == 0:
            with optimizer.gathered():  # one rank's own, inside
                assert model.state_dict()["out.bias"].shape == (3,)
    optimizer.step()
    for source in (2, -1, True, dist.get_rank()):
        with pytest.raises(zerokit.UsageError, match="source"), optimizer.gathered(source):
            pass


def _loads_alone(stage: int, whose: str) -> None:
    model, optimizer = _build((stage, "fp32"), lr=0.1)
    own = copy.deepcopy(dict(optimizer.state_dict()))
    _step(model, optimizer)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(own) if whose == "optimizer" else model.load_state_dict(
            Net(seed=5).state_dict()
        )
    _step(model, optimizer)


@pytest.mark.full(default="3-model")
@pytest.mark.parametrize("whose", ["model", "optimizer"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_load_on_one_rank_alone_is_an_error_on_all(stage: int, whose: str) -> None:
    for outcome in run_ranks_expecting_errors(2, _loads_alone, stage, whose, timeout=3.0):
        assert outcome.raised("ZerokitError"), outcome.describe()


@on_ranks(2, STAGES)
def test_an_exception_inside_hides_no_difference(stage: int) -> None:
    model, optimizer = _build((stage, "fp32"))
    with contextlib.suppress(KeyError), optimizer.gathered():
        _by_value(model)  # on all ranks
        raise KeyError
    _step(model, optimizer)
    with pytest.raises(KeyError):
        _change_on_rank_0(model, optimizer, _by_data, fail=True)
    with pytest.raises(zerokit.LayoutMismatch, match="changed weights"):
        _step(model, optimizer)


class Stranger(nn.Module):
    """A parameter and buffers that it cannot initialise by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("gone", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + sum(buffer.sum() for buffer in self.buffers())


@contextlib.contextmanager
def _on_meta(there: bool) -> Iterator[None]:
    with torch.device("meta") if there else contextlib.nullcontext():
        yield


@on_ranks(3, WHERE)
def test_rank_0_has_the_values_and_the_others_are_on_meta(where: tuple[Any, DtypeName]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Stranger(), nn.Linear(8, 2))

    torch.manual_seed(3)
    expected = build()
    with _on_meta(dist.get_rank() > 0):
        torch.manual_seed(3)
        model = build()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=where[0], precision=where[1], lr=0.1)
    for name, value in _elements(optimizer).items():
        assert torch.equal(value, expected.get_parameter(name))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name))
    optimizer.backward(model(torch.ones(2, 8)).float().square().mean())
    optimizer.step()
    _shown(model, optimizer)


@on_ranks(2)
def test_values_that_rank_0_does_not_have_are_refused() -> None:
    with _on_meta(dist.get_rank() == 0):
        model = nn.Linear(4, 4)
    with pytest.raises(zerokit.UsageError, match="rank 1 has values of bias, which rank 0 has on meta"):
        zerokit.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
