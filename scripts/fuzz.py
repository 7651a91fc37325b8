"""Coverage-guided fuzzing, each target in a process of its own (see scripts/fuzz).

A reader may accept its input or refuse it with `CheckpointError`. Any other exception, ten seconds or 2 GiB for one
input, and accepting what does not hold are failures.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pickle
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = 120
# What the readers look for: without it, bytes seldom form a known key.
WORDS = r"""
"name" "shape" "dtype" "group" "trainable" "aliases" "units" "scopes" "parameters" "streams" "kind"
"crc32" "scalars" "files" "common" "extra" "bytes" "header_bytes" "data_offsets" "__metadata__"
"float32" "bfloat16" "F32" "BF16" "param" "master" "$" "items" "tuple" "dict" "Counter" "set"
"torch" "hex" "0x1" "base64" \\ud800 true false null 1e999 -1 18446744073709551615 [0,1] {} [] },{
[[0,1]]
"""


def check_header(data: bytes) -> None:
    """What is accepted tiles the file. The first byte is how many bytes of data come; 255: the rest is the file."""
    from zerokit.checkpoint.safetensors import parse_header

    size, data = data[0] if data else 255, data[1:]
    if size != 255:
        data = len(data).to_bytes(8, "little") + data + bytes(size)
    header = parse_header(data, len(data), "input")
    end = header.size
    for tensor in header.tensors.values():
        assert tensor.offset == end, tensor
        end += tensor.size
    assert end == len(data)


def check_manifest(data: bytes) -> None:
    """The checksum is made right. What is accepted is written again as it was understood, and places its files."""
    from zerokit.checkpoint.manifest import parse_manifest
    from zerokit.checkpoint.safetensors import rank_file

    manifest = parse_manifest(b'{"crc32":"%08x",' % zlib.crc32(data) + data, "input")
    assert parse_manifest(manifest.to_bytes(), "input") == manifest
    for rank in {0, manifest.world - 1}:
        file = rank_file(manifest.layout, manifest.streams, manifest.step, rank)
        assert file.size == len(file.header) + sum(extent.size for extent in file.extents)


def check_extra(data: bytes) -> None:
    """What is accepted is encoded again."""
    from zerokit.checkpoint.extra import decode, encode
    from zerokit.checkpoint.strict import parse_json
    from zerokit.errors import CheckpointError

    try:
        plain = parse_json(data)
    except (ValueError, RecursionError):
        return
    value = decode(plain, {})
    with contextlib.suppress(CheckpointError):  # for instance, as deep as reading allows
        again, tensors = encode(value)
        assert json.dumps(encode(decode(again, {}))[0]) == json.dumps(again)
        assert not tensors


def check_pickle(data: bytes) -> None:
    """What is accepted is written again as it was understood; plain data is Python's, too."""
    from zerokit.checkpoint.formats.description import plain_value
    from zerokit.checkpoint.formats.pickles import parse_pickle, to_pickle

    value = parse_pickle(data, "input")
    content = to_pickle(value)
    assert to_pickle(parse_pickle(content, "input")) == content
    plain_value(value, "input", [])


def check_torch(data: bytes) -> None:
    """Tensors that are found lie in the file."""
    from zerokit.checkpoint.formats.torchfile import read_torch_file

    with _as_file(data) as path, path.open("rb") as file:
        pending, seen = [read_torch_file(path, file.fileno())], set()
        while pending:
            part = pending.pop()
            if hasattr(part, "blob"):
                size = part.numel * part.element_bytes
                assert not (size and part.contiguous) or part.offset + size <= len(data), part
            elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
                seen.add(id(part))
                pending.extend(part.values() if isinstance(part, dict) else part)


def check_dcp(data: bytes) -> None:
    """Metadata beside files that are whole. What is accepted is a checkpoint whose places lie in its files."""
    from zerokit.checkpoint.formats import open_source
    from zerokit.layout import Interval

    folder = _dcp_folder()
    (folder / ".metadata").write_bytes(data)
    source = open_source(folder)
    sizes = dict(source.held_files())
    for number, stream in enumerate(source.streams):
        for position in stream.parameters:
            parameter = source.layout.parameters[position]
            for stretch in source.locate(number, position, Interval(0, parameter.numel)):
                end = stretch.offset + stretch.interval.numel * stream.element_bytes
                assert end <= sizes[source.file_path(stretch.file).name]
    list(source.verified(lambda done: None))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="zerokit-fuzz-") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


@functools.cache
def _dcp_folder() -> Path:
    """A small checkpoint of DCP's, in a folder that the process leaves to the system."""
    from tests.support.checkpoints import example_content, example_layout, write_checkpoint
    from zerokit.checkpoint.formats.convert import convert

    folder = Path(tempfile.mkdtemp(prefix="zerokit-fuzz-"))
    layout = example_layout(2)
    write_checkpoint(folder / "step", layout, example_content(layout))
    return convert(folder / "step", folder / "dcp", format="dcp").output


def foreign_seeds(target: str) -> Iterator[bytes]:
    """Valid files of other frameworks."""
    if target == "dcp":
        yield (_dcp_folder() / ".metadata").read_bytes()
        return
    if target == "pickle":
        small = [OrderedDict(a=(1, 2.5, None)), {1: [b"\0", "text"], (2, "b"): {True}}, 1 << 70]
        yield from (pickle.dumps(value, protocol) for value in small for protocol in (2, 4))
    from tests.support.archives import unpack

    with tempfile.TemporaryDirectory() as folder:
        unpack(ROOT / "tests/formats/fixtures/deepspeed-3-fp32.tar.xz", Path(folder))
        for path in sorted(Path(folder).rglob("*rank_0_*.pt")):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                yield path.read_bytes() if target == "torch" else archive.read(name)


def seeds(target: str) -> Iterator[bytes]:
    """Valid inputs."""
    from tests.support.checkpoints import common_file, example_content, example_layout, write_checkpoint
    from zerokit.checkpoint.extra import encode

    if target in ("pickle", "torch", "dcp"):
        yield from foreign_seeds(target)
        return
    if target == "extra":
        from collections import Counter

        yield json.dumps(
            encode([{1: (2.5, None)}, {"a": {1, 2}}, Counter("abba"), 2**70, b"\0", float("inf")])[0]
        ).encode()
        return
    for world in (1, 3):
        layout = example_layout(world)
        content = example_content(layout)
        if target == "header":
            whole = common_file(content.common[:world])
            length = int.from_bytes(whole[:8], "little")
            yield b"\xff" + whole
            yield bytes([len(whole) - 8 - length]) + whole[8 : 8 + length].rstrip()
        else:
            with tempfile.TemporaryDirectory() as folder:
                manifest = write_checkpoint(Path(folder) / "step", layout, content)
            yield manifest.to_bytes()[20:]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": check_header,
    "manifest": check_manifest,
    "extra": check_extra,
    "pickle": check_pickle,
    "torch": check_torch,
    "dcp": check_dcp,
}


def fuzz(target: str, arguments: list[str]) -> None:
    """Does not return: the fuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["zerokit"]):
        import zerokit.checkpoint.extra
        import zerokit.checkpoint.formats
        import zerokit.checkpoint.manifest
        import zerokit.checkpoint.safetensors  # noqa: F401
    from zerokit.errors import CheckpointError

    if target == "dcp":
        _dcp_folder()  # made before the clock of the first input runs

    def one(data: bytes) -> None:
        with contextlib.suppress(CheckpointError):
            TARGETS[target](data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=int, default=SECONDS, help="of each target")
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    options = parser.parse_args()
    if not set(options.targets) <= set(TARGETS):
        parser.error(f"the targets are {', '.join(TARGETS)}")
    failed = []
    for target in options.targets or TARGETS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number, seed in enumerate(seeds(target)):
                (folder / f"seed-{number}").write_bytes(seed)
            words = folder.with_suffix(".dict")
            words.write_text(
                "".join(f'"{word.replace(chr(34), chr(92) + chr(34))}"\n' for word in WORDS.split())
            )
            command = [sys.executable, __file__, "--inside", target, f"-max_total_time={options.seconds}"]
            command += ["-timeout=10", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1"]
            command += [f"-dict={words}", f"-artifact_prefix={ROOT / f'fuzz-{target}-'}", str(folder)]
            print(f"fuzz: {target} for {options.seconds} s", flush=True)
            if subprocess.run(command, check=False).returncode:
                failed.append(target)
            words.unlink()
    print(f"fuzz: {'failed: ' + ', '.join(failed) if failed else 'nothing found'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main())
