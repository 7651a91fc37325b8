"""Pure parts: headers, where tensors lie, which requests bring elements where, and their checksums together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokit.checkpoint.checksum import Part, Piece, Pieces, along, combine
from zerokit.checkpoint.copying import Copier
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.requests import Conversion, Memory, read, requests_for
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, MAX_BYTES, lay_out, parse_header
from zerokit.checkpoint.small_floats import PACKED
from zerokit.checkpoint.source import Source, Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Interval

CONTENT = bytes(range(256)) * 2
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def intervals(sizes: Sequence[int], end: int) -> list[Interval]:
    """Neighbours of these sizes, from 0 to `end`."""
    bounds = [0]
    for size in sizes:
        bounds.append(min(bounds[-1] + size, end))
    return [Interval(a, b) for a, b in pairwise([*bounds, end]) if a < b]


@given(st.data(), SIZES, SIZES, st.integers(1, 3))
def test_the_checksums_of_cuts_follow_from_those_of_their_parts(
    data: st.DataObject, old: list[int], new: list[int], ranks: int
) -> None:
    """In whatever order, by whichever ranks, and however often the parts were read."""
    cuts, others = intervals(old, 200), intervals(new, 200)
    bounds = sorted({0, *(cut.stop for cut in (*cuts, *others))})
    parts = [Interval(a, b) for a, b in pairwise(bounds)]
    by_rank = [Pieces() for _ in range(ranks)]
    for part in data.draw(st.permutations(parts)):
        for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            middle = data.draw(st.integers(part.start, part.stop - 1))  # a request is read buffer by buffer
            for piece in (CONTENT[part.start : middle], CONTENT[middle : part.stop]):
                by_rank[rank].add(Part(3, 5, part.start), zlib.crc32(piece), len(piece))
    pieces = Pieces.joined(by_rank)
    assert pieces.parameters() == [(3, 5)]
    for wanted in (cuts, others):
        assert list(along(pieces.parts(3, 5), wanted)) == [
            (cut, Piece(zlib.crc32(CONTENT[cut.start : cut.stop]), cut.numel)) for cut in wanted
        ]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(lambda readings: len(set(readings)) > 1))
def test_readings_that_differ_are_never_right(readings: list[int]) -> None:
    pieces = Pieces()
    for reading in readings:
        one = Pieces()
        one.add(Part(0, 0, 0), reading, 4)
        pieces.update(one)
    ((_, piece),) = pieces.parts(0, 0)
    assert piece.crc not in readings


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ELEMENT_BYTES)), st.lists(st.integers(0, 3), max_size=3)).filter(
            lambda form: form[1] or form[0] not in PACKED
        )
    ),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
)
def test_tensors_lie_where_the_header_says(
    forms: list[tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    header, offsets = lay_out(((f"ü/{n}", *form) for n, form in enumerate(forms)), metadata)
    assert len(header) % 4096 == 0
    found = parse_header(header, offsets[-1], "file")
    assert found.metadata == metadata
    for number, (dtype, shape) in enumerate(forms):
        tensor = found.tensors[f"ü/{number}"]
        assert (tensor.dtype, tensor.shape) == (dtype, tuple(shape))
        assert (tensor.offset, tensor.offset + tensor.size) == (offsets[number], offsets[number + 1])


class Bytes(Memory):
    """Memory that is read to directly, or by a detour."""

    def __init__(self, size: int, *, direct: bool) -> None:
        super().__init__(size)
        self.direct = direct

    def buffer(self, at: int, size: int) -> memoryview:
        return super().buffer(at, size) if self.direct else memoryview(bytearray(size))

    def take(self, at: int, content: memoryview) -> None:
        self.content[at : at + content.nbytes] = content


def source_of(path: Path, places: Sequence[Stretch]) -> Source:
    """One parameter of two-byte elements in pieces of one file."""

    def locate(stream: int, position: int, interval: Interval) -> list[Stretch]:
        parts = [(place, place.interval.intersection(interval)) for place in places]
        return [
            Stretch(0, part, place.offset + 2 * (part.start - place.interval.start))
            for place, part in parts
            if part.numel
        ]

    return cast(
        Source,
        SimpleNamespace(
            streams=[SimpleNamespace(element_bytes=2)],
            locate=locate,
            open_file=lambda _: opened(path),
            file_path=lambda _: path,
        ),
    )


@given(st.data(), SIZES, st.booleans())
def test_copied_and_loaded_bytes_are_the_elements_asked_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, sizes: list[int], direct: bool
) -> None:
    folder = tmp_path_factory.mktemp("requests")
    elements = [CONTENT[start : start + 2] for start in range(0, 400, 2)]
    stretches, content = [], b""
    for piece in data.draw(st.permutations(intervals(sizes, 200))):
        stretches.append(Stretch(0, piece, len(content)))
        content += b"".join(elements[piece.start : piece.stop]) + b"?" * data.draw(st.integers(0, 1))
    (folder / "source").write_bytes(content)
    source = source_of(folder / "source", sorted(stretches, key=lambda place: place.interval))
    start = data.draw(st.integers(0, 199))
    wanted = Interval(start, data.draw(st.integers(start + 1, 200)))
    right = b"".join(elements[wanted.start : wanted.stop])

    memory = Bytes(len(right) + 3, direct=direct)
    loaded = read(source, requests_for(source, 0, 0, wanted, memory, 3))
    assert memory.content == b"\0\0\0" + right

    double = Conversion(lambda view: bytes(byte for byte in view for _ in range(2)), 2, 4)
    with Copier(jobs=2) as copier:
        plain = copier.target(folder / "plain", len(right))
        copier.copy(source, requests_for(source, 0, 0, wanted, plain, 0))
        copier.release(plain)
        converted = copier.target(folder / "converted", 2 * len(right))
        copier.copy(source, requests_for(source, 0, 0, wanted, converted, 0, double))
        copier.release(converted)
    assert (folder / "plain").read_bytes() == right
    assert (folder / "converted").read_bytes() == double.convert(memoryview(right))
    for pieces in (loaded, copier.pieces):
        assert combine(piece for _, piece in pieces.parts(0, 0)).crc == zlib.crc32(right)


A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "U8", "shape": [], "data_offsets": [24, 25]}


def file_of(header: object, data: int = 25, *, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + bytes(data)


def changed(**members: object) -> object:
    return {"a": A | members}


REFUSALS: dict[str, tuple[bytes, str]] = {
    "longer than the file": (file_of({}, 0)[:-1], "truncated: its header takes 10 bytes, the file has 9"),
    "absurd length": (b"\xff" * 8 + b"{}", f"would take {2**64 - 1} bytes, {MAX_BYTES} are allowed"),
    "no object": (file_of([], 0), "expected a JSON object"),
    "a tensor twice": (file_of(None, text=b'{"a":{},"a":{}}'), "duplicate key 'a'"),
    "unknown dtype": (file_of(changed(dtype="F12"), 24), "dtype 'F12' is unknown"),
    "negative size": (file_of(changed(shape=[-2, -3]), 24), "shape .* is impossible"),
    "a million dimensions": (file_of(changed(shape=[2**62] * 10**6), 24), "is impossible"),
    "many digits": (file_of(None, 0, text=b'{"a":' + b"9" * 10**6 + b"}"), "Exceeds the limit"),
    "too few bytes": (
        file_of(changed(data_offsets=[0, 23]), 23),
        "23 bytes for float32 of shape .*expected 24",
    ),
    "a hole in front": (file_of(changed(data_offsets=[1, 25])), "a hole between the header and tensor 'a'"),
    "a hole between": (
        file_of({"a": A, "b": B | {"data_offsets": [25, 26]}}, 26),
        "a hole between tensor 'a' and tensor 'b'",
    ),
    "an overlap": (
        file_of({"a": A, "b": B | {"data_offsets": [23, 24]}}, 24),
        "an overlap between tensor 'a' and tensor 'b'",
    ),
    "beyond the file": (file_of({"a": A, "b": B}, 24), "tensors end at byte"),
    "NaN": (file_of(None, 0, text=b'{"a": NaN}'), "NaN is not JSON"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_header_is_refused(case: str) -> None:
    content, message = REFUSALS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_header(content, len(content), "there/a.safetensors")
    assert str(caught.value).startswith("there/a.safetensors: ")
    assert len(str(caught.value)) < 500


VALID = file_of({"__metadata__": {"format": "pt"}, "a": A, "b": B})


@settings(max_examples=100)
@given(st.data())
def test_a_mutated_header_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """What is accepted tiles the file."""
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(place, min(len(content), place + 4)))
        content[place:stop] = data.draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"]", b"9", b"-", b"null", b"1e9"]))
        )
    try:
        header = parse_header(bytes(content), len(content), "file")
    except CheckpointError:
        return
    ends = [header.size]
    for tensor in header.tensors.values():
        assert tensor.offset == ends[-1]
        ends.append(tensor.offset + tensor.size)
    assert ends[-1] == len(content)
