"""Saving and loading when something is wrong: every rank says so, nothing half done is left or used."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import with_extra
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
from tests.support.optimizers import OPTIMIZERS
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.disk import new_file, read_exactly
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save

CASE = CASES["gpt_groups"]


def _saved(directory: str, steps: int = 2, name: str = "gpt_groups", optimizer: str = "adamw") -> None:
    case, run = CASES[name], Run(stage=2, optimizer=optimizer)
    model = build_seeded(case, 0)
    zero = wrap(model, case, run)
    for step in range(steps):
        one_step(model, zero, case, run, step, Trajectory())
    save(directory, zero, step=steps, extra={"note": "kept", "table": torch.arange(3)})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("source") / "run"
    run_ranks(3, _saved, str(run))
    return run


# --- what cannot be saved ----------------------------------------------------------------------------------


def _save_twice(directory: str) -> str:
    run = Run(stage=1)
    zero = wrap(build_seeded(CASE, 0), CASE, run)
    save(directory, zero, step=7)
    with pytest.raises(zerokit.CheckpointError) as caught:
        save(directory, zero, step=7)
    return str(caught.value)


def test_a_committed_step_is_never_replaced(tmp_path: Path) -> None:
    for message in run_ranks(2, _save_twice, str(tmp_path)):
        assert "saved already" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000007"]


def _save_what(directory: str, what: str) -> str:
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=3))
    extra: Any = {"fine": 1}
    place = directory
    elsewhere: Any = contextlib.nullcontext()
    if what == "a function":
        extra = {"nested": [1, {"here": print}]}
    elif what == "not shared" and dist.get_rank() == 1:
        # As on a node with a disk of its own: what is written there is not where rank 0 looks.
        own = Path(tempfile.mkdtemp())
        elsewhere = patch(
            "zerokit.checkpoint.save.new_file", lambda path, size: new_file(own / path.name, size)
        )
    elif what == "a file in the way":
        place = os.path.join(directory, "file")
    with elsewhere, pytest.raises(zerokit.CheckpointError) as caught:
        save(place, zero, step=1, extra=extra)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [("a function", "nested"), ("not shared", "not shared between the nodes"), ("a file in the way", "file")],
)
def test_what_cannot_be_saved_is_refused_everywhere_and_leaves_nothing(
    what: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    messages = run_ranks(2, _save_what, str(tmp_path), what)
    assert messages[0] == messages[1]
    assert said in messages[0]
    left = [entry for entry in tmp_path.rglob("*") if entry.is_file() and entry.name != "file"]
    assert not left
    assert not list(tmp_path.rglob("*.tmp*"))


def _wrong_steps(directory: str) -> None:
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    wrong: Any
    for wrong in (-1, 1.5, True, "7"):
        with pytest.raises(zerokit.UsageError, match="step="):
            save(directory, zero, step=wrong)
        mine: Any = 3 if dist.get_rank() == 0 else wrong
        with pytest.raises(zerokit.UsageError, match="rank 1: step="):
            save(directory, zero, step=mine)
    save(directory, zero, step=4)


def test_a_step_is_a_number_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _wrong_steps, str(tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000004"]


def _apart(directory: str) -> list[str]:
    rank = dist.get_rank()
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    said = []
    for step, run, overwrite in ((1 + rank, "run", False), (1, f"run{rank}", False), (1, "run", rank == 1)):
        with pytest.raises(zerokit.CheckpointError) as caught:
            save(f"{directory}/{run}", zero, step=step, overwrite=overwrite)
        said.append(str(caught.value))
    zero.param_groups[0]["lr"] = 0.5 + rank  # a scheduler that one rank forgot
    with pytest.raises(zerokit.CheckpointError) as caught:
        save(f"{directory}/run", zero, step=1)
    said.append(str(caught.value))
    zero.param_groups[0]["lr"] = 0.5
    save(f"{directory}/run", zero, step=1)
    return said


def test_what_ranks_ask_for_is_compared_before_anything_is_written(tmp_path: Path) -> None:
    first, second = run_ranks(2, _apart, str(tmp_path))
    assert first == second
    for message, expected in zip(
        first,
        (
            "step differs between ranks: 1 on rank 0; 2 on rank 1",
            f"the run directory differs between ranks: '{tmp_path}/run0' on rank 0; '{tmp_path}/run1' on rank 1",
            "overwrite differs between ranks: False on rank 0; True on rank 1",
            "option 'lr' of parameter group 0 differs between ranks: 0.5 on rank 0; 1.5 on rank 1",
        ),
        strict=True,
    ):
        assert expected in message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000001"]


# --- what cannot be loaded ---------------------------------------------------------------------------------


def _load(directory: str) -> dict[str, Any]:
    """Try to load; then what state the optimizer is in."""
    run = Run(stage=2)
    model = build_seeded(CASE, 0)
    zero = wrap(model, CASE, run)
    before = digest(whole_weights(model).items())
    message = ""
    try:
        load(directory, zero)
    except zerokit.CheckpointError as error:
        message = str(error)
    refused = ""
    try:
        one_step(model, zero, CASE, run, 0, Trajectory())
    except zerokit.UsageError as error:
        refused = str(error)
    unchanged = not refused and message and zero.refusal == ""
    return {"message": message, "refused": refused, "unchanged": bool(unchanged), "before": before}


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _cut(path: Path, offset: int) -> None:
    path.write_bytes(path.read_bytes()[:offset])


DATA, HEADER = -100, 40
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "data": (lambda s: _flip(s / "rank-00001-of-00003.safetensors", DATA), "rank-00001-of-00003"),
    "header": (lambda s: _flip(s / "rank-00002-of-00003.safetensors", HEADER), "rank-00002-of-00003"),
    "padding of the header": (
        lambda s: _flip(s / "rank-00000-of-00003.safetensors", 8),
        "rank-00000-of-00003",
    ),
    "manifest": (lambda s: _flip(s / "manifest.json", 300), "manifest.json"),
    "manifest's own checksum": (lambda s: _flip(s / "manifest.json", 12), "manifest.json"),
    "extra": (lambda s: _flip(s / "extra.json", 9), "extra.json"),
    "common": (lambda s: _flip(s / "common.safetensors", -3), "common.safetensors"),
    "missing file": (lambda s: (s / "rank-00001-of-00003.safetensors").unlink(), "rank-00001-of-00003"),
    "truncated file": (lambda s: _cut(s / "rank-00001-of-00003.safetensors", -64), "rank-00001-of-00003"),
    "missing manifest": (lambda s: (s / "manifest.json").unlink(), "manifest.json"),
    "missing extra": (lambda s: (s / "extra.json").unlink(), "extra.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named_on_every_rank_and_never_trained_on(fault: str, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(source, copy)
    damage, named = FAULTS[fault]
    damage(copy / "step-00000002")
    first, second = run_ranks(2, _load, str(copy))
    assert named in first["message"]
    assert named in second["message"]
    for outcome in (first, second):
        assert outcome["refused"] or outcome["unchanged"]


def test_a_file_of_another_step_is_found(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    run_ranks(3, _saved, str(copy), 1)
    shutil.copy(source / "step-00000002" / "rank-00001-of-00003.safetensors", copy / "step-00000001")
    for outcome in run_ranks(2, _load, str(copy)):
        assert "rank-00001-of-00003" in outcome["message"]


def _load_after_failure(directory: str, good: str) -> tuple[str, list[str]]:
    run = Run(stage=3)
    model = build_seeded(CASE, 0)
    zero = wrap(model, CASE, run)
    with pytest.raises(zerokit.CheckpointError):
        load(directory, zero)
    load(good, zero)
    trajectory = Trajectory()
    one_step(model, zero, CASE, run, 2, trajectory)
    return digest(whole_weights(model).items()), trajectory.bits()


def test_a_later_load_makes_the_optimizer_usable_again(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(source, copy)
    _flip(copy / "step-00000002" / "rank-00001-of-00003.safetensors", DATA)
    results = run_ranks(2, _load_after_failure, str(copy), str(source))
    assert results[0][0] == results[1][0]


# --- what is well sealed and wrong ------------------------------------------------------------------------


def _take_hostile(directory: str, good: str) -> tuple[list[str], bool]:
    """What `load` says of each step in a folder, and whether nothing had changed by then."""
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    before = [list(group["params"]) for group in zero.parts.inner.param_groups]
    rates = [group["lr"] for group in zero.param_groups]
    told = []
    for name in sorted(os.listdir(directory)):
        with pytest.raises(zerokit.CheckpointError) as caught:
            load(os.path.join(directory, name), zero)
        told.append(str(caught.value))
        assert zero.refusal == ""
    groups = zero.parts.inner.param_groups
    same = all(
        a is b
        for ours, group in zip(before, groups, strict=True)
        for a, b in zip(ours, group["params"], strict=True)
    )
    same = same and rates == [group["lr"] for group in zero.param_groups]
    load(good, zero)
    return told, same


def test_members_of_extra_are_refused_before_anything_changes(source: Path, tmp_path: Path) -> None:
    options = {"lr": 9.0}
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "1": ({"groups": [options | {"params": []}, options]}, "'groups'[0] has the member 'params'"),
        "2": ({"groups": [options]}, "'groups' has 1 elements"),
        "3": ({"scaler": {"value": 7}}, "'scaler': 'value' is '7'"),
        "4": ({"values": {"exp_avg": {"tok.weight": 1}}}, "'values'['exp_avg']"),
        "5": ({"rng": {"world": 5, "seed": 0, "step": 0}}, "expected uint8 [5, bytes]"),
        "6": ({"step": 3}, "'step' is 3, but the manifest's is 2"),
    }
    for name, (change, _) in changes.items():
        shutil.copytree(source / "step-00000002", tmp_path / "hostile" / name)
        with_extra(tmp_path / "hostile" / name, change)
    first, second = run_ranks(2, _take_hostile, str(tmp_path / "hostile"), str(source))
    assert first == second
    told, same = first
    assert same
    for text, (_, expected) in zip(told, changes.values(), strict=True):
        assert expected in text


# --- what does not fit -------------------------------------------------------------------------------------


def _load_into(directory: str, what: str) -> str:
    model = build_seeded(CASE, 0)
    run = Run(stage=2)
    if what == "another width":
        model.norm = nn.LayerNorm(7)
    if what == "another optimizer":
        run = Run(stage=2, optimizer="momentum")
    if what == "frozen":
        next(model.parameters()).requires_grad_(False)
    assert CASE.groups is not None
    one_group = what in ("one group", "another width", "frozen")
    groups: list[Any] = list(model.parameters()) if one_group else list(CASE.groups(model))
    cls, options = OPTIMIZERS[run.optimizer]
    trained = [p for p in groups if not isinstance(p, torch.Tensor) or p.requires_grad]
    zero = zerokit.ZeroOptimizer(model, cls, stage=2, precision="fp32", params=trained, **options)
    with pytest.raises(zerokit.CheckpointError) as caught:
        load(directory, zero)
    assert zero.refusal == ""
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another optimizer", "momentum_buffer"),
        ("one group", "parameter groups"),
        ("another width", "norm.weight"),
        ("frozen", "frozen"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_changes(
    what: str, said: str, source: Path
) -> None:
    first, second = run_ranks(2, _load_into, str(source), what)
    assert said in first
    assert first == second


def _load_loosely(directory: str) -> tuple[bool, str]:
    torch.manual_seed(3)
    model = build_seeded(CASE, 0)
    model.spare = nn.Linear(5, 5)
    start = model.spare.weight.detach().clone()
    zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-3)
    warns: Any = contextlib.nullcontext()
    if dist.get_rank() == 0:
        warns = pytest.warns(UserWarning, match="left as they were")
    with warns:
        load(directory, zero, strict=False)
    weights = whole_weights(model)
    dist.broadcast(start, 0)
    return torch.equal(weights["spare.weight"], start), digest(
        (n, w) for n, w in weights.items() if "spare" not in n
    )


def test_a_loose_load_takes_what_fits(source: Path) -> None:
    results = run_ranks(2, _load_loosely, str(source))
    assert all(kept for kept, _ in results)
    assert results[0][1] == results[1][1]


# --- what is read ------------------------------------------------------------------------------------------


def _bytes_read(directory: str, stage: int) -> tuple[int, int]:
    """Bytes of slices that a rank read, and bytes of what it owns."""
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=stage))
    read = 0

    def counting(fd: int, buffers: Any, offset: int, where: Any) -> None:
        nonlocal read
        read += sum(memoryview(buffer).nbytes for buffer in buffers)
        read_exactly(fd, buffers, offset, where)

    with patch("zerokit.checkpoint.requests.read_exactly", counting):
        load(directory, zero)
    own = sum(unit.payload_within(unit.shard(dist.get_rank())) for unit in zero.layout.units)
    whole = sum(unit.payload_numel for unit in zero.layout.units)
    return read, 4 * 3 * (whole if stage == 0 else own)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_reads_its_own_intervals_only(stage: int, source: Path) -> None:
    for read, own in run_ranks(4, _bytes_read, str(source), stage):
        assert read == own


def _extra(directory: str) -> Any:
    return load(directory, wrap(build_seeded(CASE, 0), CASE, Run()))


def test_extra_comes_back(source: Path) -> None:
    for extra in run_ranks(2, _extra, str(source / "step-00000002")):
        assert extra["note"] == "kept"
        assert extra["table"].tolist() == [0, 1, 2]


def _dies_while_saving(directory: str) -> None:
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))

    def full(*arguments: Any) -> None:
        raise zerokit.CheckpointError("the disk is full")

    broken: Any = (
        patch("zerokit.checkpoint.save.write_exactly", full)
        if dist.get_rank() == 1
        else contextlib.nullcontext()
    )
    with broken:
        save(directory, zero, step=1)


def test_one_ranks_error_is_everybodys_and_nothing_is_left(tmp_path: Path) -> None:
    for outcome in run_ranks_expecting_errors(2, _dies_while_saving, str(tmp_path)):
        assert outcome.raised("CheckpointError"), outcome.describe()
        assert "rank 1: the disk is full" in outcome.describe()
    assert not list(tmp_path.iterdir())
