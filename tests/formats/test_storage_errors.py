"""A file of another framework that the operating system does not read is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerokit
from tests.support.crashes import read_tree
from tests.support.unreadable import every_call


@pytest.mark.parametrize("name", ["deepspeed-2-fp32", "deepspeed-3-bf16", "fsdp2-plain"])
def test_each_call_that_fails_is_an_error(name: str, tmp_path: Path, made: Path) -> None:
    every_call(
        lambda run, out: read_tree(zerokit.convert(run, out, format="zerokit").output), made / name, tmp_path
    )
