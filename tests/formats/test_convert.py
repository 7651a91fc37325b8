"""Conversions: bits kept from format to format and world to world, damage found, nothing half-written."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zerokit
from tests.cli.inside import zerokit_inside
from tests.formats.conftest import DEEPSPEED, FSDP2, expected_bytes, held_bytes
from tests.formats.make_fixtures import STEPS
from tests.support.checkpoints import flip
from tests.support.crashes import read_tree
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.formats import dcp_items, open_source
from zerokit.checkpoint.formats.pickles import Record
from zerokit.checkpoint.formats.torchfile import StoredTensor, read_torch_file
from zerokit.checkpoint.state import tensor_of
from zerokit.errors import CheckpointError, UsageError


@pytest.mark.filterwarnings("ignore:.*DCP has no place for scaler:zerokit.ZerokitWarning")
@pytest.mark.parametrize(("name", "world"), list(zip([*DEEPSPEED, *FSDP2], cycle((1, 3)), strict=False)))
def test_every_format_becomes_zerokits_and_dcp_with_the_same_bits(
    made: Path, tmp_path: Path, name: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_items, "_MOST_OPEN", 1)  # as if there were hundreds of ranks
    expected = expected_bytes(made / name)
    ours = zerokit.convert(made / name, tmp_path / "ours", format="zerokit", world=world)
    assert held_bytes(open_source(ours.path)) == expected
    assert zerokit.verify(tmp_path / "ours").intact
    assert zerokit.diff(made / name, tmp_path / "ours").same
    zerokit.convert(tmp_path / "ours", tmp_path / "dcp", format="dcp", world=world)
    back = held_bytes(open_source(tmp_path / "dcp"))
    if world == 1:  # nothing is divided there that could tell a frozen parameter from a buffer
        back["buffer/running"] = back.pop("param/running", back.get("buffer/running", b""))
    assert back == expected


@pytest.mark.parametrize(("name", "world"), list(zip(DEEPSPEED, cycle((1, 2, 3, 8)), strict=False)))
def test_deepspeed_stays_deepspeeds_at_any_world(made: Path, tmp_path: Path, name: str, world: int) -> None:
    out = zerokit.reshard(made / name, world, tmp_path / "out")
    source = open_source(out)
    assert (source.format, source.world, source.step) == ("deepspeed", world, STEPS)
    assert held_bytes(source) == expected_bytes(made / name)
    assert zerokit.diff(made / name, out).same
    assert (out / "latest").read_text() == f"global_step{STEPS}"
    report = zerokit.verify(out)
    assert report.intact
    assert not report.without_checksums


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_keeps_the_names_of_a_programs_own_values(made: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    out = zerokit.reshard(made / "fsdp2-plain", 2, tmp_path / "out")
    assert zerokit.diff(made / "fsdp2-plain", out).same
    content = dict.fromkeys(("note", "step"))
    load(content, checkpoint_id=str(out), no_dist=True)
    assert content == {"note": ("text", 1.5), "step": STEPS}


def test_cutting_for_the_same_world_gives_deepspeeds_own_files(made: Path, tmp_path: Path) -> None:
    """What DeepSpeed wrote is the oracle, but for padding at stage 3, which it leaves uninitialised: ours is zeros."""
    for name, world in (("deepspeed-1-bf16", 3), ("deepspeed-3-fp32", 4)):
        out = zerokit.reshard(made / name, world, tmp_path / name)
        ours = sorted((out / f"global_step{STEPS}").iterdir())
        theirs = sorted((made / name / f"global_step{STEPS}").iterdir())
        assert [path.name for path in ours] == [path.name for path in theirs]
        for mine, original in zip(ours, theirs, strict=True):
            found, wanted = dict(_leaves(mine)), dict(_leaves(original))
            assert found.keys() == wanted.keys()
            for place, one in found.items():
                other = wanted[place]
                if isinstance(one, torch.Tensor):
                    assert (one.dtype, one.shape) == (other.dtype, other.shape), place
                    assert not one[one != other].any(), place
                else:
                    assert one == other, place


def _leaves(path: Path) -> Iterator[tuple[str, Any]]:
    """What is in a torch file and where, read by our own parser: torch would need DeepSpeed."""
    with opened(path) as fd:

        def walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
            if isinstance(value, StoredTensor):
                content = bytearray(os.pread(fd, value.numel * value.element_bytes, value.offset))
                yield place, tensor_of(content, value.dtype, value.shape)
            elif isinstance(value, Record):
                yield from walk([value.name, value.args, value.state], place)
            elif isinstance(value, (dict, list, tuple)):
                parts = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{place}:", len(value)), *chain(*(walk(v, f"{place}/{k}") for k, v in parts)))
            else:
                yield place, value

        yield from walk(read_torch_file(path, fd), "")


def test_what_dcp_writes_torch_reads(made: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads all of it, in one process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    zerokit.convert(made / "deepspeed-3-bf16", tmp_path / "dcp", format="dcp", world=3)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = load_file(made / "deepspeed-3-bf16" / "expected.safetensors")
    model, optim = loaded["model"], loaded["optim"]
    for key, value in expected.items():
        kind, _, name = key.partition("/")
        found = optim["state"][name][kind] if kind.startswith("exp_avg") else model[name]
        assert torch.equal(found, value), key
    assert torch.equal(model["head.weight"], expected["master/embed.weight"])
    assert optim["param_groups"][1]["lr"] == 3e-3
    assert optim["param_groups"][0]["params"] == ["embed.weight", "blocks.0.weight", "blocks.1.weight"]
    assert loaded["step"] == STEPS


@pytest.mark.parametrize("name", ["deepspeed-2-fp32", "deepspeed-3-bf16", "fsdp2-titan", "deepspeed-1-bf16"])
def test_a_flipped_byte_anywhere_is_found(made: Path, tmp_path: Path, name: str) -> None:
    source: Any = open_source(made / name)
    streams = chain(*(stored.streams.values() for stored in source.described.parameters))
    stretches = [(stretch.file, stretch.offset) for stream in streams for stretch in stream.stretches]
    places = random.Random(0).sample(stretches, 2)
    forms: tuple[str, ...] = ("zerokit", "dcp")
    running = next(b for b in source.described.buffers if b.parameter.name == "running").streams["param"]
    places += [(stretch.file, stretch.offset) for stretch in running.stretches]
    if name == "deepspeed-1-bf16":  # its half-precision weights, which no stream holds, are only copied
        weights = source.described.details.model["module"]["embed.weight"]
        places, forms = [(0, weights.offset + 2)], ("deepspeed",)
    for number, (file, offset) in enumerate(places):
        folder = Path(shutil.copytree(made / name, tmp_path / str(number)))
        flip(folder / source.file_path(file).relative_to(made / name), offset, 0x10)
        assert not zerokit.verify(folder).intact
        for form in (*forms, "huggingface") if number == 2 else forms:
            with pytest.raises(CheckpointError, match="damaged"):
                zerokit.convert(folder, tmp_path / f"out-{number}", format=form)
        assert not (tmp_path / f"out-{number}").exists()


def test_impossible_conversions_are_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        ({"format": "deepspeed"}, "only written from one of DeepSpeed"),
        ({"format": "tar"}, "expected one of zerokit"),
        ({"format": "zerokit", "world": 0}, "world=0"),
        ({"format": "zerokit", "world": 2.0}, r"world=2\.0: expected an integer"),
        ({"format": "zerokit", "jobs": "2"}, "jobs='2': expected 1"),
        ({"format": "dcp", "dtype": "bf16"}, "like are for the format huggingface, not dcp"),
        ({"format": "huggingface", "world": 2}, "omit world"),
        ({"format": "huggingface", "dtype": "fp8"}, "dtype='fp8': expected one of bf16, fp16, fp32"),
    ):
        with pytest.raises(UsageError, match=expected):
            zerokit.convert(made / "fsdp2-plain", tmp_path / "out", **arguments)
    with pytest.raises(CheckpointError, match="the output is the source itself"):
        zerokit.convert(made / "fsdp2-plain", made / "fsdp2-plain", format="dcp")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "form"), [("deepspeed-2-fp32", "deepspeed"), ("fsdp2-plain", "dcp")])
def test_a_frameworks_own_checkpoint_is_never_replaced(
    made: Path, tmp_path: Path, name: str, form: str
) -> None:
    theirs = Path(shutil.copytree(made / name, tmp_path / "theirs"))
    for result in ("expected.safetensors", "losses.json"):
        (theirs / result).unlink()
    before = read_tree(theirs)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of .*'s own: only an earlier output"):
        zerokit.convert(made / name, theirs, format=form, world=2, force=True)
    assert read_tree(theirs) == before
    for world in (2, 3):  # but our own
        zerokit.convert(made / name, tmp_path / "ours", format=form, world=world, force=True)
    assert open_source(tmp_path / "ours").world == 3
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds the file 'notes\.txt': only an earlier output"):
        zerokit.convert(made / name, tmp_path / "ours", format=form, world=2, force=True)


def test_an_output_lies_outside_the_run_it_is_made_of(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "run"))
    for output in (folder / "out", folder / f"global_step{STEPS}" / "out", folder):
        with pytest.raises(CheckpointError, match=r"lies in its source|is the source itself"):
            zerokit.convert(folder, output, format="zerokit", force=True)
    (folder / "latest").unlink()
    with pytest.raises(
        CheckpointError, match=r"has checkpoints of DeepSpeed \(global_step3\), and no latest that"
    ):
        zerokit.inspect(folder)


def test_the_command_says_what_it_wrote(made: Path, tmp_path: Path) -> None:
    run = partial(zerokit_inside, tmp_path)
    done = run("convert", str(made / "deepspeed-2-fp32"), "-o", "ours", "--to", "2", "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert (written["format"], written["world"], written["source"]) == (
        "zerokit",
        2,
        {"format": "deepspeed", "world": 4},
    )
    assert "step 3 of deepspeed as zerokit, 2 ranks, 6 files, " in done.stderr
    done = run("reshard", str(made / "deepspeed-2-fp32"), "--to", "2", "-o", "same")
    assert "in the source's format (deepspeed)" in done.stderr
    done = run("inspect", "same")
    assert "DeepSpeed, step 3, 2 ranks" in done.stdout
    done = run("reshard", str(made / "fsdp2-safetensors"), "--to", "2", "-o", "folder")
    assert "synced (its source has no checksums); zerokit.load and" in done.stderr
    done = run("verify", str(made / "fsdp2-safetensors"))
    assert (done.returncode, "no checksums" in done.stdout) == (0, True)
    done = run("convert", "ours", "theirs", "--format", "deepspeed")
    assert done.returncode == 2
    assert "only written from one of DeepSpeed" in done.stderr
    done = run("consolidate", "same", "-o", "weights", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "weights") == ["model.safetensors"]
    said = r"weights: weights of step 3 in bfloat16, 1 file, \d+\.\d kB, verified and synced\n"
    assert re.fullmatch(said, done.stderr)
    done = run("diff", "same", "weights")
    assert done.returncode == 0, done.stdout
    same = r"no difference of the weights; \d+ equal by CRC-32, \d+ of them rounded as the other side is\n"
    assert re.fullmatch(same, done.stdout)
    done = run("consolidate", "same", "--json")  # beside it, as the others do
    written = json.loads(done.stdout)
    assert (Path(written["output"]).name, written["step"]) == ("same.to-huggingface", 3)
    assert written["dtypes"] == ["float32"]
