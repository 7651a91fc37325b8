"""`zerokit.Ema` beside torch's moving average, swapping, and its way through checkpoints."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zerokit
from tests.cli.commands import zerokit_forked
from tests.support import training
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.training import SMALL, Run, Trajectory, build_seeded, one_step, trained

DECAY = 0.8
STAGES = (0, 1, 2, 3)
Weights = dict[str, Tensor]


def _averages(optimizer: zerokit.ZeroOptimizer) -> Weights:
    """Whole averages in the master dtype, put together from all ranks' pieces."""
    found: Weights = {}
    for unit, master, state in optimizer.runtime.masters():
        for part in unit.members(master):
            whole = found.setdefault(part.parameter.name, torch.zeros(part.parameter.numel))
            whole[part.interval.start : part.interval.stop] = master.like(state["ema"]).at(part.memory)
    for layout in optimizer.layout.parameters:
        if not layout.trainable:
            continue
        whole = found.setdefault(layout.name, torch.zeros(layout.numel))
        if optimizer.stage != 0:
            dist.all_reduce(whole)
        found[layout.name] = whole.view(layout.shape)
    return found


def _masters(optimizer: zerokit.ZeroOptimizer) -> list[Tensor]:
    return [master.tensor.detach().clone() for _, master, _ in optimizer.runtime.masters()]


def _whole_weights(model: nn.Module) -> Weights:
    # Below stage 3 a state_dict shares the model's memory, as in torch.
    return {name: value.clone() for name, value in training.whole_weights(model).items()}


def _same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(other[name], value) for name, value in one.items())


def _go_on(model: nn.Module, optimizer: Any, ema: zerokit.Ema, run: Run, *steps: int) -> None:
    for step in steps:
        one_step(model, optimizer, CASES["gpt"], run, step, Trajectory())
        ema.update()


def _train(name: str, run: Run) -> tuple[nn.Module, zerokit.ZeroOptimizer, zerokit.Ema]:
    """Trains and averages, as torch does with the masters, not with what compute rounds them to."""
    case, model, optimizer = trained(name, run)
    ema = zerokit.Ema(optimizer, decay=DECAY)
    expected: list[Tensor] = []
    for step in range(run.steps):
        one_step(model, optimizer, case, run, step, Trajectory())
        ema.update()
        expected = expected or _masters(optimizer)
        if step:
            get_ema_multi_avg_fn(DECAY)(expected, _masters(optimizer), step)
    for average, (_, _, state) in zip(expected, optimizer.runtime.masters(), strict=True):
        torch.testing.assert_close(state["ema"], average, rtol=1e-6, atol=1e-6)
    return model, optimizer, ema


@on_ranks(2, [("gpt_groups", "fp32", 0), ("gpt", "bf16", 1), ("lora", "bf16", 2)])
def test_every_stage_averages_as_torch_does(given: tuple[str, str, int]) -> None:
    name, precision, other = given
    one, two = (
        _averages(_train(name, Run(stage=stage, steps=5, precision=precision))[1]) for stage in (other, 3)
    )
    assert one.keys() == two.keys()
    assert _same(one, two)


def _outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(CASES["gpt"].batch(3, 0, 0)["x"]).float().clone()  # type: ignore[no-any-return]


@on_ranks(2, [Run(stage=stage, steps=3, precision=way) for way in ("fp32", "bf16") for stage in STAGES])
def test_applied_shows_averages_and_gives_the_weights_back_to_the_bit(run: Run) -> None:
    model, optimizer, ema = _train("gpt", run)
    before, weights = _outputs(model), _whole_weights(model)
    masters, moments = _masters(optimizer), copy.deepcopy(list(optimizer.state.values()))
    with ema.applied():
        averaged, shown = _outputs(model), _whole_weights(model)
        with optimizer.gathered():
            seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not torch.equal(averaged, before)
    for name, value in _averages(optimizer).items():
        assert torch.equal(shown[name], value), name
        assert torch.equal(seen[name], shown[name].to(seen[name].dtype)), name
    assert _same(weights, _whole_weights(model))
    assert torch.equal(_outputs(model), before)
    assert all(torch.equal(one, two) for one, two in zip(_masters(optimizer), masters, strict=True))
    for state, earlier in zip(optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(state[kind], value) for kind, value in earlier.items())
    # What the averaged weights compute is what a model with these weights computes.
    plain = build_seeded(CASES["gpt"], 0)
    plain.load_state_dict({name: value.float() for name, value in shown.items()}, strict=False)  # ties
    if run.precision == "fp32":
        torch.testing.assert_close(_outputs(plain), averaged, rtol=1e-6, atol=1e-6)


@on_ranks(2, STAGES)
def test_it_costs_four_bytes_an_element_of_the_shard_and_no_traffic(stage: int) -> None:
    run = Run(stage=stage, steps=2)
    _, optimizer, _ = _train("gpt", run)
    _, _, plain = trained("gpt", run, 2)
    own = optimizer.memory()
    pieces = [unit.unit.payload_within(master.interval) for unit, master, _ in plain.runtime.masters()]
    assert own.optimizer == optimizer.predicted_memory().optimizer
    assert own.optimizer - plain.memory().optimizer == 4 * sum(pieces)
    assert 0 < sum(pieces) <= sum(p.numel for p in optimizer.layout.parameters) * (0.6 if stage else 1)
    assert optimizer.traffic().bytes == plain.traffic().bytes


def _save(directory: str) -> Weights:
    _, optimizer, _ = _train("gpt", Run(stage=3, steps=3, precision="bf16"))
    zerokit.save(directory, optimizer, step=3)
    return _averages(optimizer)


def _resume(directory: str, stage: int) -> tuple[Weights, Weights]:
    run = Run(stage=stage, precision="bf16")
    _, model, optimizer = trained("gpt", run)
    ema = zerokit.Ema(optimizer, decay=DECAY)
    zerokit.load(directory, optimizer)
    loaded = _averages(optimizer)
    _go_on(model, optimizer, ema, run, 3, 4)
    return loaded, _averages(optimizer)


def _straight() -> Weights:
    return _averages(_train("gpt", Run(stage=3, steps=5, precision="bf16"))[1])


def test_a_checkpoint_holds_the_average_for_any_world_and_for_export(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, _save, run)[0]
    for world, stage in ((3, 3), (1, 1)):
        assert _same(saved, run_ranks(world, _resume, run, stage)[0][0])
    assert _same(run_ranks(2, _straight)[0], run_ranks(2, _resume, run, 2)[0][1])

    options = ("-o", "averaged", "--stream", "ema", "--dtype", "fp32")
    command = zerokit_forked(tmp_path, "consolidate", run, *options)
    assert command.returncode == 0, command.stderr
    zerokit.consolidate(run, tmp_path / "weights", dtype="fp32")
    exported = load_file(tmp_path / "averaged" / "model.safetensors")
    assert _same(saved, exported)
    assert not _same(load_file(tmp_path / "weights" / "model.safetensors"), exported)
    with pytest.raises(zerokit.UsageError, match="exp_avg, exp_avg_sq, master"):
        zerokit.consolidate(run, tmp_path / "none", stream="averages")
    zerokit.reshard(run, 3, tmp_path / "three")
    assert zerokit.diff(run, tmp_path / "three").equal


def _warns(match: str) -> Any:
    """Rank 0 says it for all."""
    return pytest.warns(UserWarning, match=match) if dist.get_rank() == 0 else contextlib.nullcontext()


@on_ranks(2)
def test_an_average_on_one_side_is_refused_or_begins_anew(tmp_path: Path) -> None:
    _, _, plain = trained("gpt", Run(stage=2), 1)
    zerokit.save(tmp_path / "plain", plain, step=1)
    _, optimizer, ema = _train("gpt", Run(stage=2, steps=2))
    zerokit.save(tmp_path / "averaged", optimizer, step=2)
    with pytest.raises(zerokit.CheckpointError, match=r"Ema.*before load"):
        zerokit.load(tmp_path / "averaged", plain)
    with _warns("average"):
        zerokit.load(tmp_path / "averaged", plain, strict=False)
    assert not any("ema" in state for state in plain.state.values())
    with _warns("average"):
        zerokit.load(tmp_path / "plain", optimizer)
    with pytest.raises(zerokit.UsageError, match="first update"):
        ema.applied().__enter__()
    ema.update()
    with ema.applied():
        pass


@on_ranks(2, STAGES)
def test_loaded_weights_begin_the_average_anew(stage: int, tmp_path: Path) -> None:
    """What was averaged before weights were loaded is no part of their average."""
    run = Run(stage=stage, steps=2, precision="bf16")
    model, optimizer, ema = _train("gpt", run)
    zerokit.save(tmp_path / str(stage), optimizer, step=2, weights_only=stage > 1)
    _go_on(model, optimizer, ema, run, 2)
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    zerokit.load(tmp_path / str(stage), optimizer, weights_only=True)
    now = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, now, strict=True))
    with pytest.raises(zerokit.UsageError, match="first update"), ema.applied():
        pass
    loaded = _whole_weights(model)
    ema.update()
    with ema.applied():
        assert _same(loaded, _whole_weights(model))
    # From there on as ever.
    _go_on(model, optimizer, ema, run, 3)
    assert not _same(loaded, {name: value.bfloat16() for name, value in _averages(optimizer).items()})


@on_ranks(3, [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})], timeout=10.0)
def test_what_is_new_to_a_checkpoint_begins_its_average(given: tuple[Any, Any], tmp_path: Path) -> None:
    """A model that has grown by a layer takes what fits: the new layer's average begins with its weights."""
    cls, options = given
    folder = tmp_path / cls.__name__
    for layers in (2, 3):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = zerokit.ZeroOptimizer(model, cls, stage=3, precision="fp32", lr=0.1, **options)
        ema = zerokit.Ema(optimizer, decay=0.5)
        if layers == 3:
            before = _whole_weights(model)["2.weight"]
            with _warns(r"2\.weight"):
                zerokit.load(folder, optimizer, strict=False)
            with ema.applied():
                assert torch.equal(_whole_weights(model)["2.weight"], before)
        for _ in range(2):
            optimizer.backward(model(torch.randn(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        zerokit.save(folder, optimizer, step=layers)
        assert abs(zerokit.Checkpoint(folder).read("ema", "0.weight")).max() > 0


@on_ranks(2)
def test_misuse_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    run = Run(stage=3)
    _, model, optimizer = trained("gpt", run)
    with pytest.raises(zerokit.UsageError, match="from 0 to 1"):
        zerokit.Ema(optimizer, decay=1.5)
    with pytest.raises(zerokit.UsageError, match="pass the ZeroOptimizer"):
        zerokit.Ema(model, decay=0.5)  # type: ignore[arg-type]
    ema = zerokit.Ema(optimizer, decay=0.5)
    with pytest.raises(zerokit.UsageError, match=r"optimizer\.ema"):
        zerokit.Ema(optimizer)
    with pytest.raises(zerokit.UsageError, match="first update"), ema.applied():
        pass
    ema.update()  # before any step: an optimizer makes its states in its first one all the same
    _go_on(model, optimizer, ema, run, 0, 1)
    with optimizer.gathered(), pytest.raises(zerokit.UsageError, match="enter applied"), ema.applied():
        pass
    with ema.applied():
        for call in (
            optimizer.step,
            ema.update,
            optimizer.state_dict,
            lambda: ema.applied().__enter__(),
            lambda: zerokit.load(tmp_path, optimizer),
            lambda: optimizer.load_state_dict({}),
        ):
            with pytest.raises(zerokit.UsageError, match=r"ema\.applied"):
                call()
        with pytest.raises(zerokit.CheckpointError, match=r"ema\.applied"):
            zerokit.save(tmp_path, optimizer, step=2)
    with pytest.raises(RuntimeError, match="the user's own"), ema.applied():
        raise RuntimeError("the user's own")
    _go_on(model, optimizer, ema, run, 2)
    zerokit.save(tmp_path, optimizer, step=3)


@on_ranks(2)
def test_what_is_frozen_later_keeps_its_average() -> None:
    run = Run(stage=2, bucket_mb=SMALL)
    _, model, optimizer = trained("gpt", run)
    ema = zerokit.Ema(optimizer, decay=0.5)
    ema.update()
    name, parameter = next(iter(model.named_parameters()))
    before = _whole_weights(model)[name]
    parameter.requires_grad_(False)
    _go_on(model, optimizer, ema, run, 0, 1)
    assert torch.equal(_averages(optimizer)[name], before)
    parameter.requires_grad_(True)
    _go_on(model, optimizer, ema, run, 2)
    assert not torch.equal(_averages(optimizer)[name], before)


@on_ranks(2)
def test_the_optimizers_own_state_has_this_ranks_part() -> None:
    _, model, optimizer = trained("gpt", Run(stage=1))
    ema = zerokit.Ema(optimizer, decay=0.5)
    _go_on(model, optimizer, ema, Run(), 0, 1)
    state = copy.deepcopy(dict(optimizer.state_dict()))
    kept = _averages(optimizer)
    _go_on(model, optimizer, ema, Run(), 2)
    optimizer.load_state_dict(state)
    assert _same(kept, _averages(optimizer))
