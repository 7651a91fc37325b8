"""Lists of hosts are read as Slurm and DeepSpeed write them, and others are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.errors import UsageError
from zerokit.launch.hosts import HostSlots, equal_slots, expand_hostlist, read_hostfile


def compress(numbers: Sequence[int], width: int) -> str:
    """Numbers in ascending order as Slurm's ranges, `01-03,07`."""
    pieces = []
    for _, run in groupby(enumerate(numbers), key=lambda one: one[1] - one[0]):
        found = [number for _, number in run]
        ends = [found[0]] if len(found) == 1 else [found[0], found[-1]]
        pieces.append("-".join(str(end).zfill(width) for end in ends))
    return ",".join(pieces)


NAMES = st.from_regex(r"[a-z]{1,5}-?", fullmatch=True)
NUMBERS = st.sets(st.integers(0, 300), min_size=1).map(sorted)


@given(st.lists(st.tuples(NAMES, NUMBERS, st.integers(1, 4), st.sampled_from(["", ".cluster"])), min_size=1))
def test_ranges_are_written_out_in_order(parts: list[tuple[str, list[int], int, str]]) -> None:
    text = ",".join(f"{name}[{compress(numbers, width)}]{end}" for name, numbers, width, end in parts)
    hosts = [
        f"{name}{str(number).zfill(width)}{end}" for name, numbers, width, end in parts for number in numbers
    ]
    assert expand_hostlist(text) == hosts


def test_single_names_and_several_brackets() -> None:
    assert expand_hostlist("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_hostlist("r[1-2]n[8-9]") == ["r1n8", "r1n9", "r2n8", "r2n9"]
    assert expand_hostlist("[1-2]") == ["1", "2"]
    assert expand_hostlist("") == []


NO_LISTS = "a[1-2|a1-2]|a]1[|a[[1-2]]|a[]|a[2-1]|a[x-y]|a[1-]|a[1,,2]|a b|a[0-9999][0-9999]"


def test_what_is_no_list_of_nodes_is_refused() -> None:
    for text in NO_LISTS.split("|"):
        with pytest.raises(
            UsageError, match=r"not a list of nodes in Slurm's form|more than a million nodes"
        ):
            expand_hostlist(text)


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_has_slots_comments_and_empty_lines(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# ours\nworker-1 slots=4\n\nuser@worker-2   slots=4 # the new one\n")
    hosts = read_hostfile(path)
    assert hosts == [HostSlots("worker-1", 4), HostSlots("user@worker-2", 4)]
    assert equal_slots(hosts) == 4
    assert equal_slots(read_hostfile(hostfile(tmp_path, "a\nb\n"))) is None
    with pytest.raises(UsageError, match="slots differ: a 2, b open; give --nproc-per-node"):
        equal_slots([HostSlots("a", 2), HostSlots("b", None)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=0\n", "line 1 of .*expected: HOST slots=N"),
        ("a\nb slots = 4\n", "line 2 of .*expected: HOST slots=N"),
        ("a max_slots=4\n", "expected: HOST slots=N"),
        ("-oProxyCommand=sh\n", "expected: HOST slots=N"),
        ("a\nb\na\n", "line 3 of .* names a twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_hostfile(hostfile(tmp_path, text))


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hostfile .*missing cannot be read"):
        read_hostfile(tmp_path / "missing")
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_hostfile(tmp_path / "hosts")
