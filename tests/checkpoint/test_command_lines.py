"""The checkpoint commands: names out of files cannot steer a terminal, and options that cannot be are wrong use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run_python
from tests.cli.inside import zerokit_inside as zerokit
from tests.support.checkpoints import example_content, example_layout, write_checkpoint, write_run
from zerokit.checkpoint.extents import Stream
from zerokit.layout import Parameter, Segment, build_layout

EVIL = "\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b31m[red]\r\nzerokit: all is well"
"""Escape sequences, other control characters, another direction of writing, ends of lines, rich's markup."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in which everything that has a name has an evil one, and such a one without its file."""
    made = tmp_path_factory.mktemp("evil")
    parameters = (
        Parameter(f"{EVIL}.weight", (8, 2), aliases=(f"{EVIL}.tied",)),
        Parameter("b", (3,), group=1),
        Parameter("a" + ".a" * 3000, (2,), group=1),
    )
    layout = build_layout([Segment(EVIL, parameters)], world=1, bucket_bytes=0)
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        content = example_content(layout, seed=seed)
        kind = f"momentum{EVIL}"
        streams = (*content.streams, Stream(kind, "float32", (0, 1, 2)))
        values = content.values | {(kind, p.name): bytes([seed]) * 4 * p.numel for p in parameters}
        common = (*content.common, (f"buffers/{EVIL}", "uint8", (1,), bytes([seed])))
        extra = content.extra | {EVIL: seed}  # type: ignore[operator]
        write_checkpoint(
            made / name, layout, replace(content, streams=streams, values=values, common=common, extra=extra)
        )
    rank = made / "c" / "rank-00000-of-00001.safetensors"
    data = bytearray(rank.read_bytes())
    data[-1] ^= 1  # of the stream with the evil name
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    rank.write_bytes(data)
    write_run(made / "run", example_layout(2), example_content(example_layout(2)))
    (made / "tmp").mkdir()
    (made / "c" / f"stranger{EVIL.replace('/', '')}").write_bytes(b"")
    return made


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "a"], 0),
        (["verify", "c"], 1),
        (["diff", "a", "b"], 1),
        (["reshard", "c", "--to", "2", "-o", "out"], 1),
        (["consolidate", "c", "-o", "out"], 1),
        (["consolidate", "a", "-o", "out", "--stream", "none"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_names_cannot_steer_a_terminal(folder: Path, arguments: list[str], code: int) -> None:
    done = zerokit(folder, *arguments)
    assert done.returncode == code, done.stderr
    told = done.stdout + done.stderr
    assert r"\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b31m[red]\r\nzerokit: all is well" in told
    assert all(letter == "\n" or letter.isprintable() for letter in told)
    assert "\nzerokit: all is well" not in told


def test_names_in_json_are_as_they_are(folder: Path) -> None:
    for arguments in (["inspect", "a"], ["verify", "c"], ["diff", "a", "b"]):
        done = zerokit(folder, *arguments, "--json")
        assert done.stdout.isascii()
        assert any(EVIL in text for text in _texts(json.loads(done.stdout)))


def _texts(plain: Any) -> Iterator[str]:
    if isinstance(plain, str):
        yield plain
    for inner in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        yield from _texts(inner)


BEYOND = "expected an integer from 1 to 1048576"
REFUSED = [
    ("reshard a --to 99999999", 2, BEYOND),
    ("reshard a --to 0", 2, "Invalid value for '--to': 0 is not in the range x>=1."),
    ("reshard a --to 2 --jobs 0", 2, "Invalid value for '--jobs'"),
    ("reshard a --to 2 --jobs 99999999", 2, "jobs=99999999: expected 1 to 1024"),
    ("reshard nowhere --to 2", 1, "zerokit: nowhere: does not exist"),
    ("reshard tmp --to 2", 1, "zerokit: tmp: not a checkpoint"),
    ("reshard run --to 2 -o run", 1, "the output is the source itself"),
    ("reshard run --to 2 -o tmp", 1, "zerokit: tmp: exists"),
    ("consolidate a -o out --max-shard-size 0", 2, "size '0'"),
    ("consolidate a -o out --dtype fp12", 2, "'fp12' is not one of 'bf16', 'fp16', 'fp32'."),
    ("consolidate run -o run", 1, "zerokit: run: the output is the source itself"),
    ("verify nowhere", 1, "zerokit: nowhere: does not exist: give the directory of a step, or of a run\n"),
    ("verify tmp", 1, "zerokit: tmp: not a checkpoint"),
    ("diff a nowhere", 2, "nowhere: does not exist"),
    ("prune run --keep-last 0", 2, "Invalid value for '--keep-last'"),
    ("prune run --keep-every 2", 2, "--keep-every M needs --keep-last K: without it no step is removed"),
    ("prune nowhere", 1, "zerokit: nowhere: does not exist: give the directory of a run"),
    ("prune run/latest", 1, "zerokit: run/latest: is not a directory"),
    ("prune a", 1, "is a step: give a run's directory"),
    ("prune tmp --keep-last 1", 1, "zerokit: tmp: not a checkpoint"),
]


@pytest.mark.parametrize(("line", "code", "message"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_what_cannot_be_is_refused_in_plain_words(folder: Path, line: str, code: int, message: str) -> None:
    before = sorted(folder.rglob("*"))
    done = zerokit(folder, *line.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_no_command_loads_torch_and_most_not_numpy(tmp_path: Path) -> None:
    write_run(tmp_path / "run", example_layout(3), example_content(example_layout(3)))
    code = """
import sys
from zerokit.cli import main
for line in sys.argv[1:]:
    sys.argv = ["zerokit", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("loaded", end.code, sorted({"torch", "mlflow", "numpy", "rich", "safetensors"} & set(sys.modules)))
from zerokit.checkpoint.reader import Checkpoint
Checkpoint("run").read("master", "gain")
assert not {"torch", "mlflow", "safetensors"} & set(sys.modules)
"""
    lines = ("prune run --keep-last 1", "reshard run --to 4", "verify run", "diff run run", "inspect run")
    done = run_python(tmp_path, "-c", code, *lines, "consolidate run -o out")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert told[:2] == ["loaded 0 []"] * 2
    assert not [
        line for line in told if "torch" in line or "mlflow" in line or not line.startswith("loaded 0")
    ]
    assert len(told) == 6
    assert not [line for line in told[:5] if "numpy" in line]
