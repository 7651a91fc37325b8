"""The checkpoint commands: names out of files cannot steer a terminal, and options that cannot be are wrong use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import zerokit
from tests.support.checkpoints import example_content, write_checkpoint
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
    )
    layout = build_layout([Segment(EVIL, parameters)], world=1, bucket_bytes=0)
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        content = example_content(layout, seed=seed)
        kind = f"momentum{EVIL}"
        streams = (*content.streams, Stream(kind, "float32", (0, 1)))
        values = content.values | {(kind, p.name): bytes([seed]) * 4 * p.numel for p in parameters}
        common = (*content.common, (f"buffers/{EVIL}", "uint8", (1,), bytes([seed])))
        extra = content.extra | {EVIL: seed}  # type: ignore[operator]
        write_checkpoint(
            made / name,
            layout,
            replace(content, streams=streams, values=values, common=common, extra=extra),
        )
    rank = made / "c" / "rank-00000-of-00001.safetensors"
    data = bytearray(rank.read_bytes())
    data[-1] ^= 1  # of the stream with the evil name
    data[4100] ^= 1
    rank.write_bytes(data)
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["reshard", "a", "--to", "99999999"],
        ["reshard", "a", "--to", "0"],
        ["reshard", "a", "--to", "-1"],
        ["reshard", "a", "--to", "2", "--jobs", "0"],
        ["reshard", "a", "--to", "2", "--jobs", "99999999"],
        ["consolidate", "a", "-o", "out", "--jobs", "0"],
        ["consolidate", "a", "-o", "out", "--jobs", "99999999"],
        ["consolidate", "a", "-o", "out", "--max-shard-size", "0"],
        ["consolidate", "a", "-o", "out", "--max-shard-size", "much"],
        ["consolidate", "a", "-o", "out", "--dtype", "fp12"],
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_are_wrong_use(folder: Path, arguments: list[str]) -> None:
    done = zerokit(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: zerokit ")
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr
