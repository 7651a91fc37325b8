"""Weights alone out of any checkpoint, exact at any world size; weights changed in place are what is saved next."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.checkpoints import (
    example_content,
    example_extra,
    example_layout,
    flip,
    weights_of,
    write_run,
)
from tests.support.crashes import read_tree
from tests.support.devices import lagging
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.saving import in_turn
from tests.support.training import Run, Trajectory, build_seeded, one_step, whole_weights, wrap
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save
from zerokit.layout import Interval
from zerokit.placement import stage_of
from zerokit.runtime.precision import DtypeName

EXTRA = {"note": "kept", "table": torch.arange(3)}


MODELS = {"tiny_parameters": "fp16", "lora": "bf16", "resnet": "fp32", "gpt": "fp32"}


def _save_all(folder: str) -> None:
    """The two kinds of every model, and a run of both kinds."""
    for name, precision in MODELS.items():
        case, run = CASES[name], Run(stage=2, precision=precision)
        model = build_seeded(case, 0)
        zero = wrap(model, case, run)
        for step in range(2):
            one_step(model, zero, case, run, step, Trajectory())
        save(f"{folder}/{name}/whole", zero, step=2, extra=EXTRA)
        save(f"{folder}/{name}/weights", zero, step=2, extra=EXTRA, weights_only=True)
    for step in (1, 2, 3, 4):
        save(f"{folder}/mixed", zero, step=step, extra=step, weights_only=step > 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save_all, str(made))
    shutil.copytree(made / "gpt" / "whole", made / "gpt" / "damaged")
    step = zerokit.Checkpoint(made / "gpt" / "damaged")
    number, position = step.find("master", step.names[-1])
    place = next(step.locate(number, position, Interval(0, 1)))
    flip(step.file_path(place.file), place.offset)
    return made


def weights(path: str | Path) -> dict[str, bytes]:
    """Every parameter in the precision of the file, and every buffer, as bytes."""
    checkpoint = zerokit.Checkpoint(path)
    found = {}
    for stream in checkpoint.streams:
        if stream.kind in ("master", "param"):
            for place in stream.parameters:
                name = checkpoint.names[place]
                found[name] = checkpoint.read(stream.kind, name).tobytes()
    for name in checkpoint.common_forms:
        if name.startswith("buffers/"):
            found[name] = bytes(checkpoint.common_tensor(name)[2])
    return found


def _state(zero: zerokit.ZeroOptimizer) -> str:
    """Everything of this rank's that weights are not."""
    state = [
        {kind: value.tolist() if isinstance(value, torch.Tensor) else value for kind, value in entry.items()}
        for entry in zero.state.values()
    ]
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in zero.param_groups
    ]
    drawn = (torch.get_rng_state().tolist(), random.getstate())
    scale = None if zero.scaler is None else (zero.scaler.value, zero.scaler.good_steps)
    return str((state, groups, drawn, scale))


def _take(folder: str, names: list[str], stage: int) -> None:
    """Load the weights of both kinds into an optimizer that has made a step, and save it whole."""
    for name in names:
        case, found = CASES[name], []
        run = Run(stage=stage, precision=MODELS[name])
        for source in ("whole", "weights"):
            model = build_seeded(case, 5)
            zero = wrap(model, case, run)
            one_step(model, zero, case, run, 0, Trajectory())
            zero.param_groups[0]["lr"] = 0.125
            before = _state(zero)
            extra = load(f"{folder}/{name}/{source}", zero, weights_only=True)
            assert _state(zero) == before
            assert (extra["note"], extra["table"].tolist()) == ("kept", [0, 1, 2])
            save(f"{folder}/{name}/again-{source}", zero, step=3, overwrite=True)
            trajectory = Trajectory()
            one_step(model, zero, case, run, 1, trajectory)
            found.append(trajectory.losses)
        assert found[0] == found[1], name


@pytest.mark.parametrize(
    ("world", "stage", "names"), [(3, 3, ["tiny_parameters", "lora"]), (1, 0, ["resnet", "gpt"])]
)
def test_weights_are_exact_at_any_world_size_and_nothing_else_changes(
    folder: Path, world: int, stage: int, names: list[str]
) -> None:
    run_ranks(world, _take, str(folder), names, stage)
    for name in names:
        wanted = weights(folder / name / "whole")
        assert weights(folder / name / "weights") == wanted
        for again in ("again-whole", "again-weights"):
            assert weights(folder / name / again) == wanted
            assert not zerokit.inspect(folder / name / again).weights_only


def _model(frozen: str, stage: int, *, value: float) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * value + number)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32")


def _refused(folder: str) -> None:
    """A full load of weights: refused on every rank with the line to write, and nothing changes."""
    case, run, told = CASES["gpt"], Run(stage=3), []
    zero = wrap(model := build_seeded(case, 0), case, run)
    before = _state(zero)
    weights, step, mixed = (
        f"{folder}/gpt/weights",
        f"{folder}/gpt/weights/step-00000002",
        f"{folder}/mixed/step-0000000",
    )
    for source in (weights, step, f"{mixed}4"):
        with pytest.raises(zerokit.CheckpointError) as caught:
            load(source, zero)
        assert (zero.refusal, _state(zero)) == ("", before)
        told.append(str(caught.value))
    one_step(model, zero, case, run, 0, Trajectory())
    of_run, of_step, beside_whole = told
    assert "step-00000002 was saved with weights_only=True" in of_run
    assert f'zerokit.load("{weights}", optimizer, weights_only=True)' in of_run
    assert of_step.startswith(f"{step}: has weights but no optimizer state")
    assert f'zerokit.load("{step}", optimizer, weights_only=True)' in of_step
    assert f'zerokit.load("{mixed}2", optimizer)' in beside_whole
    # From a run of both kinds each load takes the newest step that it can.
    newest = load(f"{folder}/mixed", zero), load(f"{folder}/mixed", zero, weights_only=True)
    assert newest == (2, 4)


def _swapped(folder: str) -> None:
    """The layer that was frozen is trained now, and the other way round: of a whole state the weights fit, too."""
    for stage, whole in product(range(4), (False, True)):
        directory = f"{folder}/swapped-{stage}-{whole}"
        first, source = _model("0", stage, value=0.25)
        save(directory, source, step=1, weights_only=not whole)
        second, zero = _model("1", stage, value=7.0)
        unfit = "trained on one side only.* 0.weight is frozen there and trained here"
        with pytest.raises(zerokit.CheckpointError, match=unfit if whole else "weights_only=True"):
            load(directory, zero)
        warns: Any = pytest.warns(UserWarning, match=unfit)
        with warns if whole and not dist.get_rank() else contextlib.nullcontext():
            load(directory, zero, weights_only=not whole, strict=not whole)
        saved = whole_weights(first)
        assert all(torch.equal(saved[name], value) for name, value in whole_weights(second).items())
        zero.backward(second(torch.ones(2, 10)).sum())
        zero.step()
        changed = {
            name for name, value in whole_weights(second).items() if not torch.equal(value, saved[name])
        }
        assert changed == {"0.weight", "0.bias"}


def _fits_in_part(folder: str) -> None:
    """What does not fit is named; a loose load takes what fits, and leaves the rest."""
    _, source = _model("none", 3, value=0.5)
    save(f"{folder}/part", source, step=1)
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 11))
    zero = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=3, precision="fp32", lr=0.1)
    start = whole_weights(model)["1.weight"].clone()
    unfit = r"1.weight is \[10, 30\] there and \[11, 30\] here"
    with pytest.raises(
        zerokit.CheckpointError, match=f"(?s){unfit}.*Build the model that was saved"
    ) as caught:
        load(f"{folder}/part", zero, weights_only=True)
    assert "SGD" not in str(caught.value)  # another optimizer is no matter
    warns: Any = pytest.warns(UserWarning, match=f"left as they were: .*{unfit}")
    with contextlib.nullcontext() if dist.get_rank() else warns:
        load(f"{folder}/part", zero, weights_only=True, strict=False)
    found = whole_weights(model)
    assert torch.equal(found["0.weight"], torch.arange(300).reshape(30, 10) * 0.5)
    assert torch.equal(found["1.weight"], start)


def _lost(folder: str) -> None:
    """Weights do not make up for a state that a damaged load has lost."""
    case, run = CASES["gpt"], Run(stage=2)
    for damaged_weights, good_weights in ((False, True), (True, True), (True, False)):
        zero = wrap(build_seeded(case, 0), case, run)
        with pytest.raises(zerokit.CheckpointError):
            load(f"{folder}/gpt/damaged", zero, weights_only=damaged_weights)
        assert zero.refusal
        load(f"{folder}/gpt/whole", zero, weights_only=good_weights)
        lost = good_weights and not damaged_weights
        assert "the state is incomplete" in zero.refusal if lost else zero.refusal == ""


def test_loads_that_are_refused_swapped_partial_or_after_a_loss(folder: Path) -> None:
    run_ranks(2, in_turn, [_refused, _swapped, _fits_in_part, _lost], str(folder), apart=False)
    assert zerokit.Checkpoint(folder / "mixed").step == 4


def test_consolidate_and_diff(tmp_path: Path) -> None:
    content = example_content(example_layout(1))
    values = {key: bytes(len(data)) for key, data in content.values.items()}
    content = replace(content, values=values, extra=example_extra(user={"note": 1}))
    slim = replace(weights_of(content), extra={"step": 100, "user": {"note": 1}})
    write_run(tmp_path / "whole", example_layout(2), content)
    write_run(tmp_path / "weights", example_layout(3), slim)
    for name in ("whole", "weights"):
        zerokit.consolidate(tmp_path / name, tmp_path / f"model-{name}")
    assert read_tree(tmp_path / "model-whole") == read_tree(tmp_path / "model-weights")
    found = zerokit.diff(tmp_path / "whole", tmp_path / "weights")
    assert [(one.stream, one.name, one.a, one.b) for one in found.differences] == [
        ("checkpoint", "content", "a whole state", "weights only")
    ]
    assert found.equal == len(slim.values)
    changed = dict(slim.values) | {("master", "gain"): b"\0\0\0\1"}
    write_run(tmp_path / "other", example_layout(3), replace(slim, values=changed))
    found = zerokit.diff(tmp_path / "whole", tmp_path / "other")
    assert [one.name for one in found.differences] == ["content", "gain"]


Ways = dict[str, Callable[[Iterable[nn.Parameter]], Any]]

HALVE: Ways = {
    "mul_": lambda parameters: [p.mul_(0.5) for p in parameters],
    "data": lambda parameters: [p.data.mul_(0.5) for p in parameters],
    "foreach": lambda parameters: torch._foreach_mul_(list(parameters), 0.5),
}


def _trained(stage: int, precision: DtypeName) -> tuple[nn.Module, zerokit.ZeroOptimizer, dict[str, Tensor]]:
    """A model after a step, one layer of it frozen, and half of its weights: what a change must leave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10), nn.Linear(10, 10))
    model[1].requires_grad_(False)
    zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision=precision, lr=0.1)
    zero.backward(model(torch.ones(2, 10)).float().sum())
    zero.step()
    zero.zero_grad()
    with zero.gathered(), torch.no_grad():  # what the model computes with is what is changed
        return model, zero, {name: value * 0.5 for name, value in model.named_parameters()}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name].to(value.dtype), value) for name, value in expected.items())


def _saved(directory: Path, zero: zerokit.ZeroOptimizer, *, weights_only: bool) -> dict[str, Tensor]:
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


@on_ranks(2, CHANGED)
def test_what_is_saved_is_what_was_changed(
    case: tuple[int, DtypeName, bool, str, bool], tmp_path: Path
) -> None:
    stage, precision, gathered, way, elsewhere = case
    with lagging("cpu") if elsewhere else contextlib.nullcontext():
        model, zero, expected = _trained(stage, precision)
        with zero.gathered() if gathered else contextlib.nullcontext():
            with torch.no_grad():
                HALVE[way](model.parameters())
            # Each of them first: what one of them takes over, the next one finds.
            own = copy.deepcopy(dict(zero.state_dict())) if way == "mul_" else None
            assert _equal(_saved(tmp_path, zero, weights_only=False), expected)
            assert _equal(_saved(tmp_path, zero, weights_only=True), expected)
        assert _equal(whole_weights(model), expected)
        if own is not None:
            zero.backward(model(torch.ones(2, 10)).float().sum())
            zero.step()
            zero.load_state_dict(own)
            trained = {name: value for name, value in expected.items() if not name.startswith("1.")}
            assert _equal(whole_weights(model), trained)


def _go_on_inside(stage: int, precision: DtypeName) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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


@on_ranks(2, ["fp32", "bf16"])
def test_a_step_and_an_average_begin_with_what_was_changed(precision: DtypeName) -> None:
    weights, averages = _go_on_inside(0, precision)
    _, _, halves = _trained(0, precision)
    assert _equal(averages, {name: value for name, value in halves.items() if not name.startswith("1.")})
    for stage in (1, 2, 3):
        found = _go_on_inside(stage, precision)
        assert _equal(found[0], weights), stage
        assert _equal(found[1], averages), stage
