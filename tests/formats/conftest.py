"""The fixtures, unpacked once a session; what a source holds, and what the framework held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.archives import unpack
from zerokit.checkpoint.source import Source
from zerokit.layout import Interval

ARCHIVES = Path(__file__).with_name("fixtures")
DEEPSPEED = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("deepspeed-*"))
FSDP2 = ["fsdp2-plain", "fsdp2-titan", "fsdp2-accelerate"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every fixture under its name; not to be written to."""
    folder = tmp_path_factory.mktemp("frameworks")
    for archive in ARCHIVES.glob("*.tar.xz"):
        unpack(archive, folder)
    return folder


def held_bytes(source: Source) -> dict[str, bytes]:
    """The elements of every stream's parameters, by "kind/name", and of the buffers."""
    held = {}
    for number, stream in enumerate(source.streams):
        for position in stream.parameters:
            parameter = source.layout.parameters[position]
            content = bytearray()
            for stretch in source.locate(number, position, Interval(0, parameter.numel)):
                size = stretch.interval.numel * stream.element_bytes
                with source.open_file(stretch.file) as fd:
                    content += os.pread(fd, size, stretch.offset)
            held[f"{stream.kind}/{parameter.name}"] = bytes(content)
    for name in source.buffers:
        held[f"buffer/{name}"] = bytes(source.common_tensor(f"buffers/{name}")[2])
    return held


def expected_bytes(folder: Path) -> dict[str, bytes]:
    """What the framework itself held when it saved."""
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in load_file(folder / "expected.safetensors").items()
    }
