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
from tests.support.distributed import run_each, run_ranks
from tests.support.models import CASES
from tests.support.training import SMALL, Run, Trajectory, build_seeded, one_step, trained

DECAY = 0.8
STEPS = 5


def _averages(optimizer: zerokit.ZeroOptimizer) -> dict[str, Tensor]:
    """Whole averages in the master dtype, put together from all ranks' pieces."""
    found: dict[str, Tensor] = {}
    for unit, master, state in optimizer.runtime.masters():
        for part in unit.members(master):
            whole = found.setdefault(part.parameter.name, torch.zeros(part.parameter.numel))
            whole[part.interval.start : part.interval.stop] = master.part(state["ema"], part.memory)
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


def _average(name: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    return [_averages(_train(name, run)[1]) for run in runs]


@pytest.mark.parametrize(
    ("name", "precision", "other"), [("gpt_groups", "fp32", 0), ("gpt", "bf16", 1), ("lora", "bf16", 2)]
)
def test_every_stage_averages_as_torch_does(name: str, precision: str, other: int) -> None:
    runs = [Run(stage=stage, steps=STEPS, precision=precision) for stage in (other, 3)]
    for one, two in run_ranks(2, _average, name, runs):
        assert one.keys() == two.keys()
        assert all(torch.equal(two[key], value) for key, value in one.items())


def _whole_weights(model: nn.Module) -> dict[str, Tensor]:
    # Below stage 3 a state_dict shares the model's memory, as in torch.
    return {name: value.clone() for name, value in training.whole_weights(model).items()}


def _outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(CASES["gpt"].batch(3, 0, 0)["x"]).float().clone()  # type: ignore[no-any-return]


def _swap(runs: list[Run]) -> None:
    for run in runs:
        model, optimizer, ema = _train("gpt", run)
        before, weights = _outputs(model), _whole_weights(model)
        masters, moments = _masters(optimizer), copy.deepcopy(list(optimizer.state.values()))
        with ema.applied():
            averaged, shown = _outputs(model), _whole_weights(model)
            with optimizer.gathered():
                seen = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert not torch.equal(averaged, before)
        for name, value in _averages(optimizer).items():
            assert torch.equal(shown[name], value.to(shown[name].dtype)), name
            assert torch.equal(seen[name], shown[name]), name
        after = _whole_weights(model)
        assert all(torch.equal(after[name], value) for name, value in weights.items())
        assert torch.equal(_outputs(model), before)
        assert all(torch.equal(one, two) for one, two in zip(_masters(optimizer), masters, strict=True))
        for state, earlier in zip(optimizer.state.values(), moments, strict=True):
            assert all(torch.equal(state[kind], value) for kind, value in earlier.items())
        # What the averaged weights compute is what a model with these weights computes.
        plain = build_seeded(CASES["gpt"], 0)
        plain.load_state_dict({name: value.float() for name, value in shown.items()}, strict=False)  # ties
        if run.precision == "fp32":
            torch.testing.assert_close(_outputs(plain), averaged, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_applied_shows_averages_and_gives_the_weights_back_to_the_bit(precision: str) -> None:
    run_ranks(2, _swap, [Run(stage=stage, steps=3, precision=precision) for stage in range(4)])


def _costs(stage: int) -> int:
    run = Run(stage=stage, steps=2)
    _, optimizer, _ = _train("gpt", run)
    _, _, plain = trained("gpt", run, 2)
    own, elements = (
        optimizer.memory(),
        sum(unit.unit.payload_within(master.interval) for unit, master, _ in plain.runtime.masters()),
    )
    assert own.optimizer == optimizer.predicted_memory().optimizer
    assert own.optimizer - plain.memory().optimizer == 4 * elements
    assert optimizer.traffic().bytes == plain.traffic().bytes
    return elements


def test_it_costs_four_bytes_an_element_of_the_shard_and_no_traffic() -> None:
    costs = run_each(2, _costs, range(4))
    assert all(0 < cut < whole for whole, cut in zip(costs[0], costs[3], strict=True))


def _save(directory: str) -> dict[str, Tensor]:
    _, optimizer, _ = _train("gpt", Run(stage=3, steps=3, precision="bf16"))
    zerokit.save(directory, optimizer, step=3)
    return _averages(optimizer)


def _resume(directory: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = Run(stage=stage, precision="bf16")
    case, model, optimizer = trained("gpt", run)
    ema = zerokit.Ema(optimizer, decay=DECAY)
    zerokit.load(directory, optimizer)
    loaded = _averages(optimizer)
    for step in range(3, 5):
        one_step(model, optimizer, case, run, step, Trajectory())
        ema.update()
    return loaded, _averages(optimizer)


def test_a_checkpoint_holds_the_average_for_any_world_and_for_export(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, _save, run)[0]
    for world, stage in ((3, 3), (1, 1)):
        loaded, _ = run_ranks(world, _resume, run, stage)[0]
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    _, resumed = run_ranks(2, _resume, run, 2)[0]
    straight = run_ranks(2, _average, "gpt", [Run(stage=3, steps=5, precision="bf16")])[0][0]
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())

    command = zerokit_forked(
        tmp_path, "consolidate", run, "-o", "averaged", "--stream", "ema", "--dtype", "fp32"
    )
    assert command.returncode == 0, command.stderr
    zerokit.consolidate(run, tmp_path / "weights", dtype="fp32")
    exported = load_file(tmp_path / "averaged" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    assert any(
        not torch.equal(value, exported[name])
        for name, value in load_file(tmp_path / "weights" / "model.safetensors").items()
    )
    with pytest.raises(zerokit.UsageError, match="exp_avg, exp_avg_sq, master"):
        zerokit.consolidate(run, tmp_path / "none", stream="averages")
    zerokit.reshard(run, 3, tmp_path / "three")
    assert zerokit.diff(run, tmp_path / "three").equal


def _warns(match: str) -> Any:
    """Rank 0 says it for all."""
    return pytest.warns(UserWarning, match=match) if dist.get_rank() == 0 else contextlib.nullcontext()


def _other_sides(directory: str) -> None:
    _, _, plain = trained("gpt", Run(stage=2), 1)
    zerokit.save(f"{directory}/plain", plain, step=1)
    _, optimizer, ema = _train("gpt", Run(stage=2, steps=2))
    zerokit.save(f"{directory}/averaged", optimizer, step=2)
    with pytest.raises(zerokit.CheckpointError, match=r"Ema.*before load"):
        zerokit.load(f"{directory}/averaged", plain)
    with _warns("average"):
        zerokit.load(f"{directory}/averaged", plain, strict=False)
    assert not any("ema" in state for state in plain.state.values())
    with _warns("average"):
        zerokit.load(f"{directory}/plain", optimizer)
    with pytest.raises(zerokit.UsageError, match="first update"):
        ema.applied().__enter__()
    ema.update()
    with ema.applied():
        pass


def test_an_average_on_one_side_is_refused_or_begins_anew(tmp_path: Path) -> None:
    run_ranks(2, _other_sides, str(tmp_path))


def _loaded_weights(directory: str) -> None:
    """What was averaged before weights were loaded is no part of their average."""
    for stage in range(4):
        run = Run(stage=stage, steps=2, precision="bf16")
        model, optimizer, ema = _train("gpt", run)
        zerokit.save(f"{directory}/{stage}", optimizer, step=2, weights_only=stage > 1)
        for step in range(2, 4):
            one_step(model, optimizer, CASES["gpt"], run, step, Trajectory())
            ema.update()
            if step == 2:
                moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
                zerokit.load(f"{directory}/{stage}", optimizer, weights_only=True)
                now = [state["exp_avg"] for state in optimizer.state.values()]
                assert all(torch.equal(one, other) for one, other in zip(moments, now, strict=True))
                with pytest.raises(zerokit.UsageError, match="first update"), ema.applied():
                    pass
                loaded = _whole_weights(model)
                ema.update()
                with ema.applied():
                    begun = _whole_weights(model)
                assert all(torch.equal(begun[name], value) for name, value in loaded.items())
        # From there on as ever.
        assert any(
            not torch.equal(_averages(optimizer)[name].bfloat16(), value) for name, value in begun.items()
        )


def test_loaded_weights_begin_the_average_anew(tmp_path: Path) -> None:
    run_ranks(2, _loaded_weights, str(tmp_path))


def _longer(directory: str) -> None:
    """A model that has grown by a layer takes what fits: the new layer's average begins with its weights."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {}),
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    }
    for name, (optimizer_class, options) in kinds.items():
        for layers in (2, 3):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
            optimizer = zerokit.ZeroOptimizer(
                model,
                optimizer_class,
                stage=3,
                precision="fp32",
                lr=0.1,
                **options,
            )
            ema = zerokit.Ema(optimizer, decay=0.5)
            if layers == 3:
                before = _whole_weights(model)["2.weight"]
                with _warns(r"2\.weight"):
                    zerokit.load(f"{directory}/{name}", optimizer, strict=False)
                with ema.applied():
                    assert torch.equal(_whole_weights(model)["2.weight"], before)
            for _ in range(2):
                optimizer.backward(model(torch.randn(4, 8)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                ema.update()
            zerokit.save(f"{directory}/{name}", optimizer, step=layers)
            averages = zerokit.Checkpoint(f"{directory}/{name}").read("ema", "0.weight")
            assert abs(averages).max() > 0


def test_what_is_new_to_a_checkpoint_begins_its_average(tmp_path: Path) -> None:
    run_ranks(3, _longer, str(tmp_path), timeout=10.0)


def _misuse(directory: str) -> None:
    run = Run(stage=3)
    case, model, optimizer = trained("gpt", run)
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
    for step in range(2):
        one_step(model, optimizer, case, run, step, Trajectory())
        ema.update()
    with optimizer.gathered(), pytest.raises(zerokit.UsageError, match="enter applied"), ema.applied():
        pass
    with ema.applied():
        for call in (
            optimizer.step,
            ema.update,
            optimizer.state_dict,
            lambda: ema.applied().__enter__(),
            lambda: zerokit.load(directory, optimizer),
            lambda: optimizer.load_state_dict({}),
        ):
            with pytest.raises(zerokit.UsageError, match=r"ema\.applied"):
                call()
        with pytest.raises(zerokit.CheckpointError, match=r"ema\.applied"):
            zerokit.save(directory, optimizer, step=2)
    with pytest.raises(RuntimeError, match="the user's own"), ema.applied():
        raise RuntimeError("the user's own")
    one_step(model, optimizer, case, run, 2, Trajectory())
    zerokit.save(directory, optimizer, step=3)


def test_misuse_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    run_ranks(2, _misuse, str(tmp_path / "run"))


def _frozen_later() -> None:
    run = Run(stage=2, bucket_mb=SMALL)
    case, model, optimizer = trained("gpt", run)
    ema = zerokit.Ema(optimizer, decay=0.5)
    ema.update()
    name, parameter = next(iter(model.named_parameters()))
    before = _whole_weights(model)[name]
    parameter.requires_grad_(False)
    for step in range(2):
        one_step(model, optimizer, case, run, step, Trajectory())
        ema.update()
    assert torch.equal(_averages(optimizer)[name], before)
    parameter.requires_grad_(True)
    one_step(model, optimizer, case, run, 2, Trajectory())
    ema.update()
    assert not torch.equal(_averages(optimizer)[name], before)


def test_what_is_frozen_later_keeps_its_average() -> None:
    run_ranks(2, _frozen_later)


def _own_state() -> None:
    case, model, optimizer = trained("gpt", Run(stage=1))
    ema = zerokit.Ema(optimizer, decay=0.5)
    for step in range(2):
        one_step(model, optimizer, case, Run(), step, Trajectory())
        ema.update()
    state = copy.deepcopy(dict(optimizer.state_dict()))
    kept = {name: value.clone() for name, value in _averages(optimizer).items()}
    one_step(model, optimizer, case, Run(), 2, Trajectory())
    ema.update()
    optimizer.load_state_dict(state)
    again = _averages(optimizer)
    assert all(torch.equal(again[name], value) for name, value in kept.items())


def test_the_optimizers_own_state_has_this_ranks_part() -> None:
    run_ranks(2, _own_state)
