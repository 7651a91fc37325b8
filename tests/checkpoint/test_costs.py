"""What hostile checkpoints cost: a refusal little, and whatever is read in proportion to the size of the files."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import (
    common_file,
    example_content,
    example_extra,
    example_layout,
    sealed,
    write_checkpoint,
)
from zerokit.checkpoint.diff import diff
from zerokit.checkpoint.extents import rank_file
from zerokit.checkpoint.formats.convert import consolidate, reshard
from zerokit.checkpoint.inspect import inspect
from zerokit.checkpoint.safetensors import lay_out
from zerokit.checkpoint.verify import verify
from zerokit.cli import cli
from zerokit.layout import Layout, Parameter, Unit

FEW = 120


def _replace_common(step: Path, content: bytes) -> None:
    (step / "common.safetensors").write_bytes(content)
    plain = json.loads((step / "manifest.json").read_bytes())
    plain["common"] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    plain["scalars"] = []
    (step / "manifest.json").write_bytes(sealed(plain))


def empty_tensors(step: Path, number: int) -> None:
    """`common` with tensors of no elements."""
    layout = example_layout(2)
    write_checkpoint(step, layout, example_content(layout))
    header, _ = lay_out(((f"buffers/{place}", "float32", (0,)) for place in range(number)), {})
    _replace_common(step, header)


def empty_units(step: Path, number: int) -> None:
    """A parameter without elements in each, and as many in one more."""
    names = [f"p{place}" for place in range(2 * number)]
    units = [*([name] for name in names[:number]), names[number:]]
    made = (Unit(n, (), tuple(Parameter(name, (0,)) for name in held), 2) for n, held in enumerate(units))
    layout = Layout(2, 0, tuple(made))
    write_checkpoint(step, layout, example_content(layout))


def long_keys(step: Path, number: int) -> None:
    """A key as long as the file, above many values: errors that name their place would cost the square of it."""
    layout = example_layout(1)
    extra = example_extra(user={"k" * 50 * number: [[0]] * number})
    write_checkpoint(step, layout, replace(example_content(layout), extra=extra))


MADE: dict[str, Callable[[Path, int], None]] = {
    "empty tensors": empty_tensors,
    "empty units": empty_units,
    "long keys": long_keys,
}


def _measured(work: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions, C's too, and the peak of the memory that Python took."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    work()  # modules are imported once
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        work()
        return calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize("case", MADE)
def test_reading_costs_in_proportion_to_the_files(tmp_path: Path, case: str) -> None:
    works: dict[str, Callable[[Path], object]] = {
        "inspect": inspect,
        "verify": verify,
        "diff": lambda step: diff(step, tmp_path / "other"),
        "reshard": lambda step: reshard(step, 3, tmp_path / "out", jobs=1, force=True),
        "consolidate": lambda step: consolidate(step, tmp_path / "model", jobs=1, force=True),
    }
    MADE[case](tmp_path / "few", FEW)
    MADE[case](tmp_path / "many", 4 * FEW)
    MADE[case](tmp_path / "other", FEW + 1)
    for name, work in works.items():
        calls, memory = {}, {}
        for size in ("few", "many"):
            calls[size], memory[size] = _measured(lambda step=tmp_path / size, work=work: work(step))  # type: ignore[misc]
        assert calls["many"] < 5 * calls["few"] + 1000, name
        grown = _size(tmp_path / "many") - _size(tmp_path / "few")
        assert memory["many"] - memory["few"] < 32 * grown, name


def test_a_folder_of_many_small_tensors_costs_in_proportion(tmp_path: Path) -> None:
    def convert(number: int) -> int:
        header, ends = lay_out(((f"layers.{place}.bias", "float32", (3,)) for place in range(number)), {})
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(header + bytes(ends[-1] - len(header)))
        return _measured(lambda: reshard(path, 2, tmp_path / "folder", jobs=1, force=True))[0]

    assert convert(4 * FEW) < 5 * convert(FEW) + 1000


def test_the_files_of_many_ranks_cost_what_they_hold() -> None:
    """Parameters × ranks would be minutes for a manifest of a few megabytes."""

    def calls_of(parameters: int, world: int) -> int:
        units = tuple(Unit(place, (), (Parameter(f"p{place}", (1,)),), world) for place in range(parameters))
        layout = Layout(world, 0, units)
        streams = example_content(layout).streams

        def files() -> None:
            fresh = Layout(world, 0, units)
            for rank in range(1, world):
                assert not rank_file(fresh, streams, 1, rank).extents

        return _measured(files)[0]

    few = calls_of(100, 100)
    assert calls_of(800, 100) < few + 50 * 800


def test_inspect_shows_so_many_lines_and_says_that_there_are_more(tmp_path: Path) -> None:
    layout = example_layout(1)
    content = example_content(layout)
    write_checkpoint(tmp_path / "step", layout, content)
    tensors = [(f"buffers/{place}", "uint8", (1,), b"\0") for place in range(3000)]
    _replace_common(tmp_path / "step", common_file(tensors))
    with contextlib.redirect_stderr(io.StringIO()):
        done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "step")])
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) < 2100
    assert "and 1,000 more (--json lists all)" in done.stdout
    done = CliRunner().invoke(cli, ["inspect", "--json", str(tmp_path / "step")])
    assert len(json.loads(done.stdout)["common"]) == 3000
