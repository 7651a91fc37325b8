"""`zerokit.LocalSteps` beside the papers' arithmetic, DDP, and itself across stages and islands."""

from __future__ import annotations

import functools
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_each, run_ranks
from tests.support.islands import DILOCO, SGD, batch_of, model_of, train_step, weights_of, wrap
from tests.support.on_ranks import on_ranks
from tests.support.training import digest
from zerokit.errors import UsageError
from zerokit.formulas import MemoryReport, TrafficReport


def _beside_ddp(islands: int, inner: int) -> None:
    rank = dist.get_rank()
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        model = model_of(seed=3 + rank)
        optimizer = wrap(model, (islands, inner), stage=3)
        outer = None if found else functools.partial(SGD, lr=1.0)
        zerokit.LocalSteps(optimizer, every=1, outer=outer)
        for step in range(10):
            train_step(model, optimizer, step, rank)
        found.append(weights_of(model))
    plain = nn.parallel.DistributedDataParallel(model_of(seed=3))
    reference = SGD(plain.parameters(), lr=0.1)
    for step in range(10):
        x, y = batch_of(step, rank)
        nn.functional.mse_loss(plain(x), y).backward()
        reference.step()
        reference.zero_grad()
    for weights in found:
        for name, value in plain.module.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("islands", "inner"), [(2, 2), (3, 1)])
def test_one_step_with_plain_sgd_is_ddp(islands: int, inner: int) -> None:
    run_ranks(islands * inner, _beside_ddp, islands, inner)


def _trained(stage: Any, precision: str, **kwargs: Any) -> dict[str, Tensor]:
    model = model_of(seed=dist.get_rank())
    optimizer = wrap(model, (2, 2), stage, cls=torch.optim.AdamW, lr=1e-2, precision=precision)
    local = zerokit.LocalSteps(optimizer, **kwargs)
    for step in range(9):
        train_step(model, optimizer, step, dist.get_rank())
    local.synchronize()
    return weights_of(model)


ADAMW = functools.partial(torch.optim.AdamW, lr=0.1)
MIXED = {"0": 3, "1": 2, "2": 0, "*": 1}
ACROSS: list[tuple[tuple[Any, ...], str, dict[str, Any]]] = [
    ((0, 1, 2, 3, MIXED), "fp32", {"every": 4}),
    ((1, 3, MIXED), "fp32", {"every": 5, "outer": None}),
    ((0, 2), "bf16", {"every": 4, "fragments": 4, "delay": 3, "outer": ADAMW}),
    ((1, 3), "bf16", {"every": 4, "wire": "int8"}),
    ((0, 2), "fp32", {"every": 4, "fragments": 3, "delay": 2, "blend": 0.5, "wire": "int4"}),
]


@on_ranks(4, ACROSS)
def test_equal_bits_at_every_stage_and_on_every_island(
    case: tuple[tuple[Any, ...], str, dict[str, Any]],
) -> None:
    stages, precision, kwargs = case
    found: set[str] = set()
    for stage in stages:
        everyone = [""] * 4
        dist.all_gather_object(everyone, digest(_trained(stage, precision, **kwargs).items()))
        found |= set(everyone)
    assert len(found) == 1


def _costs(case: tuple[Any, Any]) -> tuple[MemoryReport, TrafficReport]:
    stage, wire = case
    model = model_of()
    optimizer = wrap(model, (2, 2), stage)
    local = zerokit.LocalSteps(optimizer, every=3, fragments=2, delay=1, wire=wire)
    for step in range(5):
        assert bool(local.traffic().by_operation) == (step > 2)
        train_step(model, optimizer, step, dist.get_rank())
    assert local.traffic().by_operation == local.predicted_traffic().by_operation
    return local.memory(), local.traffic()


def test_what_a_round_takes() -> None:
    """After step 5 the first fragment, half of the model, is in flight for the second time."""
    numel = 4 * (16 * 16 + 16)
    stages = [*range(4), {"0": 3, "1": 3, "*": 2}]
    cases = [(stage, wire) for stage in stages for wire in (None, "int8")]
    for (stage, wire), ranks in zip(cases, run_each(4, _costs, cases), strict=True):
        # What each island knows, and what its movements have lost.
        kept = numel * 8 if wire is None else numel * (8 + 2 * 4 + 2 * 4)
        assert sum(memory.optimizer for memory, _ in ranks) == kept
        assert all(memory.buckets >= numel // 2 * 4 // 2 for memory, _ in ranks)
        for _, traffic in ranks:
            operations = {name: (one.calls, one.elements) for name, one in traffic.by_operation.items()}
            # Layers at stage 3 are not gathered.
            whole = 0 if stage == 3 else 2 if isinstance(stage, dict) else 4
            inner = {"all_gather/inner": (whole, whole * numel // 2)} if whole else {}
            assert operations == {"reduce_scatter/outer": (2, numel), "all_gather/outer": (2, numel)} | inner
            wide = traffic.by_operation["reduce_scatter/outer"].bytes / numel
            assert wide == 4 if wire is None else 1 < wide < 1.1


@on_ranks(4, (None, "int8"))
def test_what_zerokit_keeps_does_not_depend_on_the_default_dtype(wire: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = model_of()
        torch.set_default_dtype(dtype)
        try:
            optimizer = wrap(model, (2, 2), precision=zerokit.Precision(compute="fp32", wire="int8"))
            zerokit.LocalSteps(optimizer, every=2, wire=wire)
            for step in range(4):
                train_step(model, optimizer, step, dist.get_rank())
            found.append(weights_of(model))
        finally:
            torch.set_default_dtype(torch.float32)
    for weights in found:
        assert all(torch.equal(value, weights[name]) for name, value in found[0].items())


@on_ranks(2)
def test_fragments_in_flight_are_blended_in_when_they_are_due() -> None:
    """Two islands, fragments in flight and a scheduled outer rate, beside the same on whole tensors."""
    rank, every, delay, blend = dist.get_rank(), 4, 2, 0.25
    model = model_of()
    optimizer = wrap(model, (2, 1), stage=2)
    local = zerokit.LocalSteps(optimizer, every=every, outer=DILOCO, fragments=2, delay=delay, blend=blend)
    assert local.outer is not None
    schedule = torch.optim.lr_scheduler.ExponentialLR(local.outer, 0.9)
    plain = model_of()
    inner = SGD(plain.parameters(), lr=0.1)
    blocks = [list(plain[:2].parameters()), list(plain[2:].parameters())]
    anchors = [[nn.Parameter(p.detach().clone()) for p in block] for block in blocks]
    outers = [DILOCO(block) for block in anchors]
    arriving: dict[int, tuple[int, list[Tensor]]] = {}
    for step in range(1, 20):
        train_step(model, optimizer, step, rank)
        if step > 1:
            schedule.step()  # what is in flight has the rate from when it began
        x, y = batch_of(step, rank)
        inner.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        inner.step()
        if step in arriving:
            number, values = arriving.pop(step)
            with torch.no_grad():
                for p, value in zip(blocks[number], values, strict=True):
                    p.lerp_(value, blend)
        for number in range(2):
            if step % every == (2 * number + 2) % every:
                for p, anchor in zip(blocks[number], anchors[number], strict=True):
                    mean = p.detach().clone()
                    dist.all_reduce(mean)
                    anchor.grad = anchor.detach() - mean / 2
                outers[number].param_groups[0]["lr"] = 0.7 * 0.9 ** (step - 2)
                outers[number].step()
                arriving[step + delay] = number, [anchor.detach().clone() for anchor in anchors[number]]
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=0, atol=1e-6), name
    assert local.steps == 19


@on_ranks(2)
def test_what_a_narrow_wire_rounds_away_does_not_add_up() -> None:
    gaps = []  # how far the weights after each round are from those of an exact wire
    models = [model_of(), model_of()]
    optimizers = [wrap(model, (2, 1)) for model in models]
    for optimizer, wire in zip(optimizers, (None, "int4"), strict=True):
        zerokit.LocalSteps(optimizer, every=2, outer=None, wire=wire)  # type: ignore[arg-type]
    for step in range(24):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, optimizer, step, dist.get_rank())
        if step % 2:
            exact, narrow = (torch.cat([p.flatten() for p in weights_of(model).values()]) for model in models)
            gaps.append(float((narrow - exact).norm() / exact.norm()))
    assert 0 < max(gaps) < 0.02
    assert mean(gaps[-4:]) < 2 * mean(gaps[:4])


def _inside() -> tuple[float, float, int, list[int]]:
    rank = dist.get_rank()
    model = model_of()
    optimizer = wrap(model, (2, 2), stage=2, precision="fp16", loss_scale=zerokit.LossScale(value=2.0**10))
    local = zerokit.LocalSteps(optimizer, every=4)
    norm = 0.0
    for step in range(4):
        x, y = batch_of(step, rank)
        loss = nn.functional.mse_loss(model(x).float(), y) * (rank // 2 + 1)
        if rank == 3 and step == 3:
            loss = loss * float("inf")  # overflows on island 1 alone, in the step of the synchronisation
        optimizer.backward(loss)
        if step == 0:
            norm = optimizer.clip_grad_norm_(float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([value.flatten().float() for value in weights_of(model).values()])
    return (
        norm,
        optimizer.loss_scale,
        optimizer.skipped_steps,
        [local.steps, int(weights.double().sum() * 2**30)],
    )


def test_norm_overflow_and_loss_scale_are_each_islands_own() -> None:
    ranks = run_ranks(4, _inside)
    assert ranks[0][0] == ranks[1][0] != ranks[2][0] == ranks[3][0]
    assert [rank[1] for rank in ranks] == [2.0**10, 2.0**10, 2.0**9, 2.0**9]
    assert [rank[2] for rank in ranks] == [0, 0, 1, 1]
    assert len({tuple(rank[3]) for rank in ranks}) == 1  # they have met all the same


@on_ranks(4)
def test_with_schedulers_averages_frozen_parameters_and_buffers() -> None:
    """Schedulers, Ema, gathered(), the model's state_dict, frozen parameters and buffers."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer = wrap(model, (2, 2), stage=3, cls=torch.optim.AdamW)
    local = zerokit.LocalSteps(optimizer, every=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    assert local.outer is not None
    outer_schedule = torch.optim.lr_scheduler.LambdaLR(local.outer, lambda count: 1.0 / (1 + count))
    ema = zerokit.Ema(optimizer, decay=0.5)
    frozen = weights_of(model)
    for step in range(6):
        train_step(model, optimizer, step, rank)
        ema.update()
        schedule.step()
        if step % 3 == 2:
            outer_schedule.step()
    with optimizer.gathered():
        train_step(model, optimizer, 6, rank)
        local.synchronize()
        seen = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    shown = model.state_dict()
    assert torch.equal(seen, torch.cat([shown[name].flatten() for name, _ in model.named_parameters()]))
    everyone = [torch.empty_like(seen) for _ in range(4)]
    dist.all_gather(everyone, seen)
    assert all(torch.equal(seen, other) for other in everyone)
    assert all(torch.equal(shown[name], frozen[name]) for name in ("2.weight", "2.bias"))
    means = [torch.empty(16) for _ in range(4)]
    dist.all_gather(means, model[1].running_mean)
    assert not torch.equal(means[0], means[2])  # buffers stay those of each island
    with ema.applied():
        model(batch_of(0, 0)[0])
        with pytest.raises(UsageError, match="leave the context first"):
            local.synchronize()


@on_ranks(4)
def test_buffers_of_any_kind_and_parameters_without_elements() -> None:
    """Buffers of all kinds, and a fragment in flight of a parameter without elements."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(16, 16), nn.ParameterList([torch.empty(0)]), nn.Linear(16, 16))
    nothing = next(model[1].parameters())
    buffers = {
        "complex": torch.full((3,), complex(rank, 1)),
        "expanded": torch.full((1,), float(rank)).expand(1000, 7),
        "strided": torch.full((4, 6), rank, dtype=torch.int16)[::2, 1:].t(),
        "scalar": torch.tensor(rank > 0),
        "eight": torch.full((2,), float(rank)).to(torch.float8_e4m3fn),
    }
    for name, value in buffers.items():
        model.register_buffer(name, value)
    optimizer = wrap(model, (2, 2), stage=2)
    local = zerokit.LocalSteps(optimizer, every=3, fragments=3, delay=2)
    for value in model.buffers():
        assert value.real.float().eq(0).all()
    for _ in range(7):
        optimizer.backward(model[2](model[0](torch.ones(2, 16))).square().mean() + nothing.sum())
        optimizer.step()
        optimizer.zero_grad()
    local.synchronize()
