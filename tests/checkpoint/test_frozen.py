"""Frozen parameters once for all steps of a run, or in none: exact, never out of date, and gone with the last step."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import zerokit
from tests.checkpoint.test_format import SCHEMA, read_all
from tests.support.checkpoints import flip, leave_work
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from zerokit.checkpoint import commit as commit_module
from zerokit.checkpoint import frozen as frozen_module
from zerokit.checkpoint.bases import unreferenced
from zerokit.checkpoint.manifest import parse_manifest
from zerokit.checkpoint.verify import verify_all
from zerokit.checkpoint.writing import write_rank, write_rest
from zerokit.cli.checkpoints import verify
from zerokit.process import Process

BASE_BYTES = 4 * (300 * 200 + 300)


class Lora(nn.Module):
    """A base of two dtypes, of which one parameter has no elements, and a small trained layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.adapter = nn.Linear(6, 6)
        self.base = nn.Linear(200, 300).requires_grad_(False)
        self.table = nn.Parameter(torch.randint(256, (7, 3), dtype=torch.uint8), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.seen, torch.Tensor)
        self.seen.add_(1)
        trained: torch.Tensor = self.adapter(x)
        return trained + self.base.bias[:6] + self.table.float().sum()


def made(stage: Any = 2, seed: int = 0) -> tuple[Lora, zerokit.ZeroOptimizer]:
    model = Lora(seed)
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="fp32", lr=0.1)


def train(model: Lora, zero: zerokit.ZeroOptimizer) -> None:
    zero.backward(model(torch.ones(2, 6)).square().sum())
    zero.step()
    zero.zero_grad()


def bases(run: Path | str) -> list[str]:
    return sorted(path.name for path in Path(run).glob("frozen-*"))


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def bits(model: nn.Module) -> dict[str, bytes]:
    """Weights and buffers. Collective."""
    state = model.state_dict()
    return {name: state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in state}


def loaded(run: Path) -> dict[str, bytes]:
    """What a new model of other values has after a load at stage 3. Collective."""
    model, zero = made(3, seed=8)
    zerokit.load(run, zero)
    return bits(model)


# --- one run, saved by two ranks, in every way --------------------------------------------------------------


def _save_all(folder: str) -> dict[str, bytes]:
    model, zero = made()
    for step in (1, 2, 3):
        train(model, zero)
        for frozen in ("always", "once", "never"):
            zerokit.save(f"{folder}/{frozen}", zero, step=step, frozen=frozen, extra={"step": step})
    return bits(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, _save_all, str(folder))[0]


@pytest.fixture
def folder(saved: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    """A copy of the three runs."""
    return Path(shutil.copytree(saved[0], tmp_path / "saved"))


def test_later_saves_take_what_is_trained_and_no_more(folder: Path) -> None:
    assert len(bases(folder / "once")) == 1
    (name,) = bases(folder / "once")
    assert BASE_BYTES < size(folder / "once" / name) < BASE_BYTES + 20_000
    for step in ("step-00000001", "step-00000002", "step-00000003"):
        once, never, always = (size(folder / frozen / step) for frozen in ("once", "never", "always"))
        assert always - BASE_BYTES < once < always - BASE_BYTES + 2000
        assert never <= once
    assert bases(folder / "never") == bases(folder / "always") == []


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_reshard_is_the_complete_step(folder: Path, world: int) -> None:
    ours, theirs = (
        zerokit.reshard(folder / frozen, world, folder / f"{frozen}-cut") for frozen in ("once", "always")
    )
    assert read_tree(ours.parent) == read_tree(theirs.parent)
    assert zerokit.diff(folder / "once", ours.parent).same
    shutil.rmtree(folder / "once")
    assert zerokit.verify(ours).intact


def test_every_tool_reads_both_as_one(folder: Path) -> None:
    once, always = folder / "once", folder / "always"
    assert zerokit.diff(once, always).same
    assert zerokit.diff(once, folder / "never").same
    for frozen in ("once", "always"):
        zerokit.consolidate(folder / frozen, folder / f"{frozen}-model")
        with pytest.warns(zerokit.ZerokitWarning, match="random number generators: not carried over"):
            zerokit.convert(folder / frozen, folder / f"{frozen}-dcp", format="dcp", world=3)
    for kind in ("model", "dcp"):
        assert read_tree(folder / f"once-{kind}") == read_tree(folder / f"always-{kind}")
    assert zerokit.diff(once, folder / "once-model").same
    for name in ("base.weight", "base.bias", "table", "empty"):
        ours, theirs = (zerokit.Checkpoint(run).read("param", name) for run in (once, always))
        np.testing.assert_array_equal(ours, theirs)
    summary = zerokit.inspect(once)
    assert summary.frozen == bases(once)[0]
    assert summary.run is not None
    assert [shared.name for shared in summary.run.frozen] == bases(once)
    assert summary.bytes < BASE_BYTES
    assert (zerokit.inspect(always).frozen, zerokit.inspect(folder / "never").frozen) == (None, "")


def test_a_stranger_s_reader_reads_both_as_one(folder: Path) -> None:
    """By FORMAT.md alone, the directory's name too."""
    step = folder / "once" / "step-00000002"
    values = read_all(step)
    assert values == read_all(folder / "always" / "step-00000002")
    manifest = json.loads((step / "manifest.json").read_text())
    contents = []
    for stream in manifest["streams"]:
        for first, last in stream["parameters"] if stream["kind"] == "param" else ():
            for parameter in manifest["parameters"][first:last]:
                data = values["param", parameter["name"]]
                contents.append([parameter["name"], stream["dtype"], parameter["shape"], zlib.crc32(data)])
    text = json.dumps(sorted(contents))
    assert bases(folder / "once") == [f"frozen-{hashlib.sha256(text.encode()).hexdigest()[:16]}"]
    jsonschema.validate(manifest, SCHEMA)


def test_the_directory_is_a_checkpoint_of_weights_itself(folder: Path) -> None:
    path = folder / "once" / bases(folder / "once")[0]
    assert zerokit.verify(path).intact
    base = zerokit.Checkpoint(path)
    assert base.weights_only
    assert sorted(base.names) == ["base.bias", "base.weight", "empty", "table"]


def test_versions_are_those_that_older_readers_refuse_or_know(folder: Path) -> None:
    def version(step: Path) -> str:
        return (step / "manifest.json").read_text().split('"version":')[1][:6]

    assert version(folder / "always" / "step-00000001") == "[1,0],"
    assert version(folder / "once" / "step-00000001") == "[2,0],"
    assert version(folder / "never" / "step-00000001") == "[2,0],"
    assert version(folder / "once" / bases(folder / "once")[0]) == "[1,1],"
    content = (folder / "once" / "step-00000001" / "manifest.json").read_bytes()
    outside = content.replace(b'"base":"frozen-', b'"base":"../../x')
    with pytest.raises(zerokit.CheckpointError, match="damaged"):
        parse_manifest(outside, "m")


def test_verify_reads_shared_bytes_once_and_names_the_damaged_ones(folder: Path) -> None:
    run = folder / "once"
    (name,) = bases(run)
    assert [report.bytes_read > BASE_BYTES for report in verify_all(run)] == [True, False, False]
    flip(run / name / "rank-00001-of-00002.safetensors", -1)
    report = zerokit.verify(run)
    assert [finding.file for finding in report.findings] == [f"{name}/rank-00001-of-00002.safetensors"]
    assert report.findings[0].parameter in ("base.weight", "base.bias", "table")
    with pytest.raises(zerokit.CheckpointError, match=f"{name}: param/"):
        zerokit.consolidate(run, folder / "model")
    assert not (folder / "model").exists()
    zerokit.Checkpoint(run).read("master", "adapter.weight")


def test_a_step_alone_says_what_is_missing(folder: Path) -> None:
    run, alone = folder / "once", folder / "alone"
    (name,) = bases(run)
    shutil.copytree(run / "step-00000003", alone / "step-00000003")
    missing = re.escape(f"a directory {name} that is not beside it: copy that")
    for use in (
        lambda: zerokit.consolidate(alone / "step-00000003", folder / "model"),
        lambda: zerokit.reshard(alone / "step-00000003", 3, folder / "cut"),
        lambda: zerokit.Checkpoint(alone / "step-00000003").read("param", "table"),
        lambda: zerokit.Checkpoint(alone),
    ):
        with pytest.raises(zerokit.CheckpointError, match=missing):
            use()
    assert not zerokit.verify(alone / "step-00000003").intact
    assert zerokit.diff(alone / "step-00000003", run).same
    (folder / "link").symlink_to(run / "step-00000003")
    zerokit.consolidate(folder / "link", folder / "model")
    shutil.copytree(run / name, alone / name)
    assert zerokit.diff(alone, folder / "model").same


def test_another_directory_of_that_name_is_refused(folder: Path) -> None:
    run = folder / "once"
    (name,) = bases(run)
    other = run_ranks(1, _other_base, str(folder / "other"))[0]
    shutil.rmtree(run / name)
    shutil.copytree(folder / "other" / other, run / name)
    with pytest.raises(zerokit.CheckpointError, match="has other frozen parameters than this step"):
        zerokit.Checkpoint(run / "step-00000003").read("param", "table")


def _other_base(run: str) -> str:
    _, zero = made(seed=5)
    zerokit.save(run, zero, step=3, frozen="once")
    return bases(run)[0]


# --- loading ------------------------------------------------------------------------------------------------


def _resume(folder: str, stage: Any, seed: int) -> dict[str, bytes]:
    model, zero = made(stage, seed)
    assert zerokit.load(f"{folder}/once", zero) == {"step": 3}
    found = bits(model)
    before = bases(f"{folder}/once")
    zerokit.save(f"{folder}/once", zero, step=4, frozen="once", keep_last=1)
    assert bases(f"{folder}/once") == before  # two ranks wrote it, and as many as there are refer to it
    zerokit.load(f"{folder}/once", zero, weights_only=True)
    assert bits(model) == found
    return found


@pytest.mark.full(default="3-3")
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 3), (3, 1)])
def test_any_number_of_ranks_resumes(
    saved: tuple[Path, dict[str, bytes]], folder: Path, world: int, stage: int
) -> None:
    for found in run_ranks(world, _resume, str(folder), stage, 9):
        assert found == saved[1]
    assert zerokit.list_steps(folder / "once") == [4]
    assert zerokit.verify(folder / "once").intact


def _load_damaged(folder: str) -> str:
    _, zero = made(3)
    with pytest.raises(zerokit.CheckpointError) as raised:
        zerokit.load(f"{folder}/once", zero)
    return str(raised.value)


def test_damage_of_what_is_shared_is_every_rank_s_error(folder: Path) -> None:
    (name,) = bases(folder / "once")
    flip(folder / "once" / name / "rank-00000-of-00002.safetensors", -1)
    messages = run_ranks(2, _load_damaged, str(folder))
    assert messages[0] == messages[1]
    assert f"{name}: param/" in messages[0]
    # Every step needs it, so none is taken instead of the newest.
    (folder / "once" / name / "rank-00000-of-00002.safetensors").unlink()
    messages = run_ranks(2, _load_damaged, str(folder))
    assert "has no step to resume from" in messages[0]
    assert f"{name}/rank-00000-of-00002.safetensors" in messages[0]


def _heal(folder: str) -> None:
    _, zero = made()
    zerokit.save(f"{folder}/once", zero, step=9, frozen="once")


def test_what_was_lost_is_written_again_under_the_same_name(folder: Path) -> None:
    (name,) = bases(folder / "once")
    for lose in (
        lambda path: (path / "rank-00000-of-00002.safetensors").unlink(),
        shutil.rmtree,
    ):
        lose(folder / "once" / name)
        assert not zerokit.verify(folder / "once" / "step-00000001").intact
        run_ranks(2, _heal, str(folder))
        assert bases(folder / "once") == [name]
        assert zerokit.verify(folder / "once" / "step-00000001").intact
        shutil.rmtree(folder / "once" / "step-00000009")


def _never(folder: str, stage: Any) -> dict[str, bytes]:
    model, zero = made(stage)
    assert zerokit.load(f"{folder}/never", zero) == {"step": 3}
    found = bits(model)
    zerokit.load(f"{folder}/never", zero, weights_only=True)
    other, zero = made(stage, seed=4)
    before = bits(other)
    refusal = "saved with frozen='never'.* table, base.weight, base.bias. Build the model"
    for weights_only in (False, True):
        with pytest.raises(zerokit.CheckpointError, match=refusal):
            zerokit.load(f"{folder}/never", zero, weights_only=weights_only)
    assert bits(other) == before
    train(other, zero)  # nothing has changed, so nothing is refused
    if dist.get_rank() == 0:
        with pytest.warns(zerokit.ZerokitWarning, match="left as they were: frozen parameters with other"):
            zerokit.load(f"{folder}/never", zero, strict=False)
    else:
        zerokit.load(f"{folder}/never", zero, strict=False)
    after = bits(other)
    for name in after:
        assert after[name] == (before if name.startswith(("base", "table")) else found)[name], name
    return found


@pytest.mark.full(default="1-2")
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (3, 3)])
def test_never_takes_the_model_s_own_and_refuses_others(
    saved: tuple[Path, dict[str, bytes]], folder: Path, world: int, stage: int
) -> None:
    for found in run_ranks(world, _never, str(folder), stage):
        assert found == saved[1]


def test_never_is_refused_where_its_weights_are_wanted(folder: Path) -> None:
    run = folder / "never"
    for use in (
        lambda: zerokit.consolidate(run, folder / "model"),
        lambda: zerokit.convert(run, folder / "dcp", format="dcp"),
        lambda: zerokit.Checkpoint(run).read("param", "table"),
    ):
        with pytest.raises(
            zerokit.CheckpointError, match="in no file, because it was saved with frozen='never'"
        ):
            use()
    assert not (folder / "model").exists()
    assert not (folder / "dcp").exists()
    cut = zerokit.reshard(run, 3, folder / "cut")
    assert zerokit.diff(run, cut).same
    done = CliRunner().invoke(verify, [str(cut)])
    assert (done.exit_code, "without its frozen parameters" in done.output) == (0, True)


# --- what changes is written anew ---------------------------------------------------------------------------


def _gathered(model: Lora, zero: zerokit.ZeroOptimizer) -> None:
    with zero.gathered(), torch.no_grad():
        model.base.weight[17, 3] += 1


def _data(model: Lora, zero: zerokit.ZeroOptimizer) -> None:
    model.base.bias.data[5] = 3.0


def _loaded(model: Lora, zero: zerokit.ZeroOptimizer) -> None:
    state = model.state_dict()
    state["table"] = 255 - state["table"]
    model.load_state_dict(state)


CHANGES: dict[str, tuple[Any, Callable[[Lora, zerokit.ZeroOptimizer], None]]] = {
    "gathered, stage 3": (3, _gathered),
    "gathered, stage 0": (0, _gathered),
    "data, stage 2": (2, _data),
    "load_state_dict, stage 3": (3, _loaded),
}


@on_ranks(2, cases=CHANGES)
def test_a_changed_base_is_written_anew(name: str, tmp_path: Path) -> None:
    stage, change = CHANGES[name]
    run = tmp_path / name
    model, zero = made(stage)
    zerokit.save(run, zero, step=1, frozen="once")
    first = bits(model)
    change(model, zero)
    zerokit.save(run, zero, step=2, frozen="once")
    second = bits(model)
    assert first != second
    assert len(bases(run)) == 2
    for step, expected in ((1, first), (2, second), (1, first)):
        zerokit.load(run / f"step-{step:08d}", zero)
        assert bits(model) == expected
    dist.barrier()
    zerokit.save(run, zero, step=3, frozen="once")  # the first one's again
    assert len(bases(run)) == 2
    dist.barrier()
    (one,) = {base for base in bases(run) if base in (run / "step-00000003" / "manifest.json").read_text()}
    zerokit.save(run, zero, step=4, frozen="once", keep_last=2)
    assert bases(run) == [one]
    zerokit.save(run, zero, step=5, keep_last=1)  # nothing refers to it any more
    assert bases(run) == []
    zerokit.load(run, zero)
    assert bits(model) == first


def _again(model: nn.Module, *, trained: bool) -> tuple[Lora, zerokit.ZeroOptimizer]:
    """Another model with these weights, of which the base's bias is trained or not."""
    other = Lora()
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    other.base.bias.requires_grad_(trained)
    return other, zerokit.ZeroOptimizer(other, torch.optim.AdamW, stage=2, precision="fp32", lr=0.1)


@on_ranks(2)
def test_what_was_unfrozen_and_trained_is_another_base(tmp_path: Path) -> None:
    model, zero = made()
    zerokit.save(tmp_path, zero, step=1, frozen="once")
    second, zero = _again(model, trained=True)
    train(second, zero)
    zerokit.save(tmp_path, zero, step=2, frozen="once", keep_last=1)
    trained = bits(second)
    _, zero = _again(second, trained=False)
    zerokit.save(tmp_path, zero, step=3, frozen="once", keep_last=2)
    dist.barrier()
    assert len(bases(tmp_path)) == 2
    assert loaded(tmp_path) == trained


@on_ranks(2)
def test_a_step_that_is_replaced_lets_go_of_its_base(tmp_path: Path) -> None:
    model, zero = made()
    zerokit.save(tmp_path, zero, step=1, frozen="once")
    before = bases(tmp_path)
    _data(model, zero)
    zerokit.save(tmp_path, zero, step=1, frozen="once", overwrite=True)
    assert len(bases(tmp_path)) == 1
    assert bases(tmp_path) != before
    assert loaded(tmp_path) == bits(model)


@on_ranks(2)
def test_a_background_save_keeps_the_base_of_its_moment(tmp_path: Path) -> None:
    model, zero = made()
    train(model, zero)
    expected = bits(model)
    running = zerokit.save(tmp_path, zero, step=1, frozen="once", blocking=False, keep_last=1)
    assert zero.host_copy is not None
    assert zero.host_copy.nbytes < BASE_BYTES
    with zero.gathered(), torch.no_grad():
        model.base.weight.fill_(-1.0)
    train(model, zero)
    running.wait()
    changed = bits(model)
    zerokit.save(tmp_path, zero, step=2, frozen="once", blocking=False).wait()
    other, zero = made(3, seed=2)
    for step, wanted in ((1, expected), (2, changed)):
        zerokit.load(tmp_path / f"step-{step:08d}", zero)
        assert bits(other) == wanted


@on_ranks(2)
def test_weights_alone_share_it_too(tmp_path: Path) -> None:
    model, zero = made(3)
    zerokit.save(tmp_path, zero, step=1, frozen="once")
    train(model, zero)
    zerokit.save(tmp_path, zero, step=2, frozen="once", weights_only=True)
    dist.barrier()
    assert len(bases(tmp_path)) == 1
    found = bits(model)
    other, zero = made(2, seed=2)
    zerokit.load(tmp_path, zero, weights_only=True)
    assert bits(other) == found


@on_ranks(2)
def test_without_frozen_parameters_nothing_is_different(tmp_path: Path) -> None:
    zero = zerokit.ZeroOptimizer(nn.Linear(8, 8), torch.optim.AdamW, stage=2, precision="fp32")
    for frozen in ("always", "once", "never"):
        zerokit.save(tmp_path / frozen, zero, step=1, frozen=frozen)
    dist.barrier()
    always = read_tree(tmp_path / "always")
    assert read_tree(tmp_path / "once") == read_tree(tmp_path / "never") == always


@on_ranks(2)
def test_ranks_that_differ_and_unknown_values_are_named(tmp_path: Path) -> None:
    _, zero = made()
    with pytest.raises(
        zerokit.CheckpointError, match="frozen differs between ranks: 'once' on rank 0; 'never'"
    ):
        zerokit.save(tmp_path, zero, step=1, frozen="never" if dist.get_rank() else "once")
    wrong: Any = "twice"
    with pytest.raises(zerokit.UsageError, match="frozen='twice': expected one of 'always', 'once', 'never'"):
        zerokit.save(tmp_path, zero, step=1, frozen=wrong)
    with pytest.raises(zerokit.UsageError, match="step=-1: expected"):
        zerokit.save(tmp_path, zero, step=-1, frozen="once")
    assert not list(tmp_path.iterdir())
    zerokit.save(tmp_path, zero, step=1, frozen="once")


# --- what may be removed ------------------------------------------------------------------------------------


def test_prune_removes_it_with_the_last_step_that_needs_it(folder: Path) -> None:
    run = folder / "once"
    (name,) = bases(run)
    planned = zerokit.prune(run, keep_last=1, dry_run=True)
    assert [doomed.path.name for doomed in planned.removed] == ["step-00000001", "step-00000002"]
    zerokit.prune(run, keep_last=1)
    assert zerokit.verify(run).intact
    (run / "step-00000003").rename(run / "best")  # a user's own name for it
    shutil.copytree(folder / "always" / "step-00000003", run / "step-00000004")
    assert unreferenced(run) == []
    assert zerokit.verify(run / "best").intact
    shutil.rmtree(run / "best")
    assert [path.name for path in unreferenced(run)] == [name]
    writer = leave_work(run, Process.current(), "step-00000009")
    assert unreferenced(run) == []  # it may be about to name it
    shutil.rmtree(writer)
    shutil.rmtree(run / "step-00000004")
    shutil.copytree(folder / "never" / "step-00000003", run / "step-00000003")
    planned = zerokit.prune(run, keep_last=1, dry_run=True)
    assert [(doomed.path.name, doomed.size > BASE_BYTES) for doomed in planned.removed] == [(name, True)]
    assert bases(run) == [name]
    zerokit.prune(run)  # leftovers alone
    assert bases(run) == [name]
    zerokit.prune(run, keep_last=1)
    assert bases(run) == []


def _lose_it(folder: str) -> None:
    """Another process removes it just before the step is committed."""
    model, zero = made()
    run = Path(folder, "run")
    zerokit.save(run, zero, step=1, frozen="once")
    train(model, zero)

    def lose(*given: Any) -> None:
        shutil.rmtree(run / bases(run)[0])
        write_rest(*given)

    with (
        patch.object(commit_module, "write_rest", lose),
        pytest.raises(zerokit.CheckpointError, match="another process has removed or changed it"),
    ):
        zerokit.save(run, zero, step=2, frozen="once")
    assert zerokit.list_steps(run) == [1]
    zerokit.save(run, zero, step=2, frozen="once")
    assert zerokit.verify(run).intact


def test_a_step_without_its_base_is_never_committed(tmp_path: Path) -> None:
    run_ranks(1, _lose_it, str(tmp_path))


def _change_while_written(folder: str) -> None:
    model, zero = made()
    run = Path(folder, "run")

    def change(*given: Any) -> Any:
        model.base.bias.data[0] += 1
        return write_rank(*given)

    with (
        patch.object(frozen_module, "write_rank", change),
        pytest.raises(zerokit.CheckpointError, match="frozen parameters have changed while"),
    ):
        zerokit.save(run, zero, step=1, frozen="once")
    assert not bases(run)
    assert zerokit.list_steps(run) == []
    zerokit.save(run, zero, step=1, frozen="once")
    assert zerokit.verify(run).intact


def test_a_base_is_what_its_name_says(tmp_path: Path) -> None:
    run_ranks(1, _change_while_written, str(tmp_path))
