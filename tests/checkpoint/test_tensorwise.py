"""Checkpoints of optimizers that look at whole tensors: any number of ranks goes on with the same bits."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon

import zerokit
from tests.checkpoint.test_format import SCHEMA, VALIDATOR, read_all, read_manifest, read_uncut
from tests.support.checkpoints import flip
from tests.support.crashes import read_tree
from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import MIXES
from tests.support.oracle import train_alone
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.load import load
from zerokit.checkpoint.prune import foreign_to_step
from zerokit.checkpoint.save import save
from zerokit.runtime.masters import WholeMaster

NAME, CASE = "odd_shapes", CASES["odd_shapes"]
SAVED, ENDED = 4, 6
"""Steps. SOAP brings its factors up to date in the fourth."""
STAGES_ON_THREE = (0, 2, 3)
ON_A_MESH = ((0, 3), (1, 2), (3, 3))


def _plain(value: Any) -> Any:
    """A state, tensors as their bits and their order in memory."""
    if isinstance(value, Tensor):
        order = value.stride() if value.numel() > 1 else ()
        return str(value.dtype), tuple(value.shape), order, digest([("", value)])
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def states_of(optimizer: zerokit.ZeroOptimizer) -> dict[Any, Any]:
    """What owners have, by parameter and rows, on every rank; and the groups' options."""
    own, runtime = {}, optimizer.runtime
    for unit, master, state in runtime.masters():
        if isinstance(master, WholeMaster):
            name = unit.unit.parameters[master.whole.position].name
            found = {kind: _plain(value) for kind, value in state.items()}
            own[name, *runtime.owners.rows(master.whole)] = found | {"master": _plain(master.tensor.detach())}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {key: state for each in everyone for key, state in each.items()} | {"groups": groups}


def _go_on(model: nn.Module, optimizer: zerokit.ZeroOptimizer, run: Run) -> str:
    for step in range(SAVED, ENDED):
        one_step(model, optimizer, CASE, run, step, Trajectory())
    return digest(whole_weights(model).items())


def _trained(run: Run, **options: Any) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    model = build_seeded(CASE, dist.get_rank())
    optimizer = wrap(model, CASE, run, **options)
    for step in range(SAVED):
        one_step(model, optimizer, CASE, run, step, Trajectory())
    return model, optimizer


def _save(run: Run, folder: str) -> tuple[Any, str]:
    model, optimizer = _trained(run)
    save(f"{folder}/run", optimizer, step=SAVED)
    return states_of(optimizer), _go_on(model, optimizer, run)


def _resume(runs: list[Run], folder: str) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for run in runs:
        model = build_seeded(CASE, 9 + dist.get_rank())
        optimizer = wrap(model, CASE, run)
        load(f"{folder}/run", optimizer)
        states = states_of(optimizer)
        again = f"{folder}/again-{dist.get_world_size()}-{len(found)}"
        save(again, optimizer, step=SAVED)
        found.append((states, _go_on(model, optimizer, run)))
    return found


def _alone(run: Run) -> str:
    return train_alone(NAME, run, 4, later=(SAVED, 3))[0].weights


@pytest.mark.full(default=["muon-bf16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mix", MIXES)
def test_four_ranks_save_and_others_go_on_with_the_same_bits(
    mix: str, precision: str, tmp_path: Path
) -> None:
    run, folder = Run(optimizer=mix, precision=precision, steps=ENDED), str(tmp_path)
    states, weights = run_ranks(4, _save, run, folder)[0]
    three = run_ranks(3, _resume, [replace(run, stage=stage) for stage in STAGES_ON_THREE], folder)[0]
    runs = [replace(run, stage=3), *(replace(run, stage=pair, mesh=(2, 2)) for pair in ON_A_MESH)]
    four, *mesh = run_ranks(4, _resume, runs, folder)[0]
    assert four == (states, weights)
    for found in (*three, *mesh):
        assert found[0] == states
    assert len({bits for _, bits in three}) == len({bits for _, bits in mesh}) == 1
    if precision == "fp32":
        assert three[0][1] == run_alone(_alone, run)

    again = list(tmp_path.glob("again-*"))
    assert len(again) == len(STAGES_ON_THREE) + len(runs)
    for path in again:
        assert zerokit.diff(tmp_path / "run", path).same
    assert zerokit.verify(tmp_path / "run").intact
    zerokit.reshard(tmp_path / "run", 3, tmp_path / "three")
    zerokit.reshard(tmp_path / "three", 4, tmp_path / "four")
    assert read_tree(tmp_path / "four") == read_tree(tmp_path / "run")
    cut, saved = (read_tree(tmp_path / name) for name in ("three", "again-3-0"))
    for name in cut:  # generators are those of four ranks
        if "rank-" in name or "states-" in name:
            assert cut[name] == saved[name]


def test_strangers_read_every_state(tmp_path: Path) -> None:
    """Only a step with states of other shapes is of version 3."""
    for mix, version in (("muon", [1, 0]), ("lamb", [1, 0]), ("adafactor", [3, 0]), ("soap", [3, 0])):
        states, _ = run_ranks(2, _save, Run(optimizer=mix), f"{tmp_path}/{mix}")[0]
        step = tmp_path / mix / "run" / f"step-{SAVED:08d}"
        manifest = read_manifest(step)
        VALIDATOR.validate(manifest)
        assert manifest["version"] == version
        assert set(manifest) <= set(SCHEMA["properties"])
        streams, uncut = read_all(step), read_uncut(step, manifest)
        for key, own in states.items():
            if key == "groups":
                continue
            name, first, last = key
            kinds = {kind for kind, parameter in streams if parameter == name}
            assert own["master"][3] == _digest_of(streams["master", name], own["master"])
            others = uncut.get((name, first, last), {})
            assert kinds.isdisjoint(others)
            assert kinds | others.keys() <= own.keys()
            for kind, value in others.items():
                assert _read_as(value, own[kind]) == own[kind]


def _digest_of(content: bytes, like: Any) -> str:
    values = torch.frombuffer(bytearray(content), dtype=getattr(torch, like[0].removeprefix("torch.")))
    return digest([("", values.reshape(like[1]))])


def _read_as(value: Any, like: Any) -> Any:
    """What a stranger has read, a tensor as its bytes, as `_plain` has it: with the order of memory there."""
    if isinstance(value, list):
        return [_read_as(one, other) for one, other in zip(value, like, strict=True)]
    return (*like[:3], _digest_of(value, like)) if isinstance(value, bytes) and value else like


@on_ranks(3, [(mix, stage) for mix in ("muon", "soap") for stage in (0, 2, 3)])
def test_every_way_to_save_writes_the_same(case: tuple[str, int], tmp_path: Path) -> None:
    """Beside the training, with frozen parameters elsewhere, with an average, after some were frozen for a while."""
    mix, stage = case
    folder, run = f"{tmp_path}/{mix}-{stage}", Run(optimizer=mix, stage=stage)
    model = build_seeded(CASE, dist.get_rank())
    model.get_parameter("stem.bias").requires_grad_(False)
    optimizer = _without_frozen(model, run)
    ema = zerokit.Ema(optimizer, decay=0.5)
    for step in range(SAVED):
        model.get_submodule("blocks.1").requires_grad_(step != 1)
        model.get_submodule("blocks.2").requires_grad_(False)  # never trained
        one_step(model, optimizer, CASE, run, step, Trajectory())
        ema.update()
    states = states_of(optimizer)
    traffic = optimizer.traffic()
    save(first := f"{folder}/blocking", optimizer, step=SAVED)
    save(f"{folder}/weights", optimizer, step=SAVED, weights_only=True)
    save(f"{folder}/once", optimizer, step=SAVED, frozen="once")
    save(f"{folder}/never", optimizer, step=SAVED, frozen="never")
    before = {name: value.clone() for name, value in whole_weights(model).items()}
    saving = save(f"{folder}/background", optimizer, step=SAVED, blocking=False)
    one_step(model, optimizer, CASE, run, SAVED, Trajectory())
    assert optimizer.traffic() == traffic
    saving.wait()
    for name in ("once", "never", "background"):
        assert zerokit.diff(first, f"{folder}/{name}").same
        assert zerokit.verify(f"{folder}/{name}").intact
    for name, value in before.items():
        saved = zerokit.Checkpoint(f"{folder}/weights")
        kind = "master" if saved.layout.find(name)[0].trainable else "param"
        assert torch.equal(torch.as_tensor(saved.read(kind, name)), value), name
    file = zerokit.Checkpoint(first).manifest.files[dist.get_rank()]
    assert optimizer.memory().host_copy >= file.size - file.header_size

    other = build_seeded(CASE, 5)
    other.get_parameter("stem.bias").requires_grad_(False)
    again = _without_frozen(other, replace(run, stage=3 - stage))
    average = zerokit.Ema(again, decay=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no optimizer states, which begin with the first step")
        load(f"{folder}/once", again)
    assert states_of(again) == states
    assert average.decay == 0.5
    save(f"{folder}/again", again, step=SAVED)
    assert zerokit.diff(first, f"{folder}/again").same


def _without_frozen(model: nn.Module, run: Run) -> zerokit.ZeroOptimizer:
    """The classes of a run, with what is trained of the model alone."""
    classes = MIXES[run.optimizer](model)
    for groups in classes.values():
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zerokit.errors.ZerokitWarning)
        return zerokit.ZeroOptimizer(
            model, classes, stage=run.stage, precision="fp32", bucket_mb=run.bucket_mb
        )


def _matrices(model: nn.Module, first: Any, **options: Any) -> zerokit.ZeroOptimizer:
    """`first` for the matrices of the blocks, AdamW for the rest; with None AdamW for all."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    classes: Any = {AdamW: [{"params": matrices}, {"params": rest}]}
    if first is not None:
        classes = {first: [{"params": matrices, "lr": 0.01}], AdamW: [{"params": rest, "lr": 0.01}]}
    return zerokit.ZeroOptimizer(model, classes, precision="fp32", **options)


def _stepped(optimizer: zerokit.ZeroOptimizer, steps: int = 2) -> zerokit.ZeroOptimizer:
    for step in range(steps):
        one_step(optimizer.runtime.model, optimizer, CASE, Run(), step, Trajectory())
    return optimizer


PAIRS = {
    "AdamW, then Muon": (
        None,
        Muon,
        r"\(Muon\) keeps momentum_buffer for group 0, the checkpoint has exp_avg",
    ),
    "Muon, then AdamW": (
        Muon,
        None,
        r"\(AdamW\) keeps exp_avg, exp_avg_sq, step for group 0, the checkpoint has",
    ),
    "AdamW, then Adafactor": (None, Adafactor, r"\(Adafactor\) keeps col_var, row_var, step for group 0"),
    "Adafactor, then AdamW": (Adafactor, None, "the checkpoint has col_var, row_var, step"),
    "Muon, then Adafactor": (Muon, Adafactor, "the checkpoint has momentum_buffer"),
    "Adafactor, then Muon": (Adafactor, Muon, "the checkpoint has col_var, row_var, step"),
}


@on_ranks(2, PAIRS)
def test_states_of_another_class_are_refused_or_begin_anew(case: str, tmp_path: Path) -> None:
    first, then, message = PAIRS[case]
    run = f"{tmp_path}/{case}"
    saved = _stepped(_matrices(build_seeded(CASE, 0), first, stage=2))
    save(run, saved, step=2)
    weights = digest(whole_weights(saved.runtime.model).items())
    optimizer = _matrices(build_seeded(CASE, 3), then, stage=3)
    before = digest(whole_weights(optimizer.runtime.model).items())
    with pytest.raises(zerokit.CheckpointError, match=message):
        load(run, optimizer)
    assert digest(whole_weights(optimizer.runtime.model).items()) == before
    load(run, optimizer, weights_only=True)
    assert digest(whole_weights(optimizer.runtime.model).items()) == weights
    optimizer = _matrices(build_seeded(CASE, 4), then, stage=1)
    warns: Any = pytest.warns(UserWarning, match=message)
    with contextlib.nullcontext() if dist.get_rank() else warns:
        load(run, optimizer, strict=False)
    assert digest(whole_weights(optimizer.runtime.model).items()) == weights
    for unit, master, state in optimizer.runtime.masters():
        names = {part.parameter.name for part in unit.members(master)}
        fresh = any(name.startswith("blocks") and name.endswith("weight") for name in names)
        assert bool(state) is not fresh, names
    _stepped(optimizer)


BLOCKS = {"blocks.0.inner.weight": 3}


@on_ranks(2)
def test_blocks_of_rows_may_change_where_states_have_their_shape(tmp_path: Path) -> None:
    for stage, rows in ((0, (4, 8)), (3, 2), (2, None)):
        saved = _stepped(_matrices(build_seeded(CASE, 0), Muon, stage=stage, row_blocks=BLOCKS))
        save(run := f"{tmp_path}/muon-{stage}", saved, step=2)
        given = {} if rows is None else {"blocks.0.inner.weight": rows}
        other = _matrices(build_seeded(CASE, 1), Muon, stage=3 - stage, row_blocks=given)
        load(run, other)
        save(f"{run}-again", other, step=2)
        assert zerokit.diff(run, f"{run}-again").same

        saved = _stepped(_matrices(build_seeded(CASE, 0), Adafactor, stage=stage, row_blocks=BLOCKS))
        save(run := f"{tmp_path}/adafactor-{stage}", saved, step=2)
        assert zerokit.diff(run, run).equal > 0
        again = _matrices(build_seeded(CASE, 1), Adafactor, stage=3 - stage, row_blocks=BLOCKS)
        load(run, again)
        assert states_of(again) == states_of(saved)
        other = _matrices(build_seeded(CASE, 1), Adafactor, stage=3 - stage, row_blocks=given)
        message = "has states of col_var, row_var for other blocks of rows (0 to 4, 4 to 8, 8 to 12 there"
        with pytest.raises(zerokit.CheckpointError, match=re.escape(message)):
            load(run, other)
        warns: Any = pytest.warns(UserWarning, match="other blocks of rows")
        with contextlib.nullcontext() if dist.get_rank() else warns:
            load(run, other, strict=False)
        for key, state in states_of(other).items():
            assert key == "groups" or (state.keys() == {"master"}) is (key[0] == "blocks.0.inner.weight")
        _stepped(other)


@on_ranks(2, MIXES)
def test_one_rank_s_state_dict_goes_on(mix: str) -> None:
    for stage in (0, 2, 3):
        run = Run(optimizer=mix, stage=stage)
        model, optimizer = _trained(run)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        states, weights = states_of(optimizer), _go_on(model, optimizer, run)
        file.seek(0)
        model = build_seeded(CASE, 7)
        optimizer = wrap(model, CASE, run)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        assert states_of(optimizer) == states
        assert _go_on(model, optimizer, run) == weights


def _saved_alone(folder: str) -> None:
    optimizer = _stepped(_matrices(build_seeded(CASE, 0), Adafactor, stage=2))
    save(f"{folder}/run", optimizer, step=2)


def _load_damaged(folder: str, names: list[str]) -> None:
    optimizer = _matrices(build_seeded(CASE, 1), Adafactor, stage=2)
    for number, name in enumerate(names):
        with pytest.raises(zerokit.CheckpointError, match=name):
            load(f"{folder}/{number}/step-00000002", optimizer)
    load(f"{folder}/run", optimizer)
    _stepped(optimizer)


def test_damage_is_found_and_all_tools_know_the_files(tmp_path: Path) -> None:
    run_ranks(2, _saved_alone, str(tmp_path))
    run = tmp_path / "run"
    step = run / "step-00000002"
    files = sorted(path.name for path in step.glob("states-*"))
    assert len(files) == 3
    damages: list[Any] = [
        lambda path: flip(path, -1),
        lambda path: flip(path, 4100),
        lambda path: flip(path, 30),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        Path.unlink,
    ]
    names = []
    for number, damage in enumerate(damages):
        names.append(files[number % len(files)])
        copied = tmp_path / str(number) / step.name
        shutil.copytree(step, copied)
        damage(copied / names[-1])
        (finding,) = zerokit.verify(copied).findings
        assert finding.file == names[-1]
        with pytest.raises(zerokit.CheckpointError, match=names[-1]):
            zerokit.reshard(copied, 3, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    run_ranks(2, _load_damaged, str(tmp_path), names)
    summary = zerokit.inspect(run)
    assert {file.name for file in summary.files} >= set(files)
    streams = {parameter.name: parameter.streams for parameter in summary.parameters}
    assert streams["blocks.0.inner.weight"] == ("master", "col_var", "row_var")
    held = zerokit.Checkpoint(run)
    ((rows, states),) = held.uncut("blocks.0.inner.weight").items()
    assert rows == (0, 12)
    assert {kind: state.shape for kind, state in states.items()} == {"col_var": (1, 12), "row_var": (12, 1)}
    other = tmp_path / "other"
    zerokit.reshard(run, 1, other)
    changed = next(other.glob(f"*/{files[0]}"))
    assert changed.read_bytes() == (step / files[0]).read_bytes()
    assert not foreign_to_step(step)


def test_exports_have_what_their_formats_have_a_place_for(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    states, _ = run_ranks(2, _save, Run(optimizer="soap"), str(tmp_path))[0]
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="DCP has no place for random number generators: not"):
        zerokit.convert(run, tmp_path / "dcp", format="dcp", world=3)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    for key, own in states.items():
        if key != "groups":
            found = loaded["optim"]["state"][key[0]]
            assert {kind for kind, value in own.items() if value not in ([], [[]])} - {
                "master"
            } <= found.keys()
            for kind in ("exp_avg", "GG", "Q"):
                if kind in found:
                    assert _bits(_plain(found[kind])) == _bits(own[kind])
    zerokit.consolidate(run, tmp_path / "model")
    assert zerokit.diff(run, tmp_path / "model").same


def _bits(value: Any) -> Any:
    """Without the order in memory."""
    return [_bits(one) for one in value] if isinstance(value, list) else (*value[:2], value[3])
