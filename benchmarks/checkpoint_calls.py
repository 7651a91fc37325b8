"""`zerokit.save` and `zerokit.load` on one rank, beside DCP's and what the disk or memory alone takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import zerokit
from benchmarks.elsewhere import take_turns
from benchmarks.measuring import empty, remove

STATE_BYTES = 12
"""A parameter's: master and two moments of AdamW, in fp32."""
WIDTH = 1024
SAVES = ("zerokit.save", "dcp.save", "write and sync")
LOADS = ("zerokit.load", "dcp.load", "read")


def trained(size_mb: float, *, rows: int, world: int = 1) -> tuple[zerokit.ZeroOptimizer, Callable[[], None]]:
    """An optimizer at stage 2 with a state of `size_mb` 10^6 bytes a rank, and what makes a step on `rows` rows.

    No layer makes numbers smaller, so that all states are dense. One step has been made.
    """
    torch.manual_seed(0)
    count = max(1, round(size_mb * 1e6 * world / STATE_BYTES / (WIDTH * WIDTH + WIDTH)))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=WIDTH**-0.5)
    model = nn.Sequential(*layers)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-4)
    batch = torch.randn(rows, WIDTH)

    def step() -> None:
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    return optimizer, step


def _buffers(state: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    for tensor in state.values():
        array: Any = tensor.detach().numpy()
        yield memoryview(array).cast("B")


def _write(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the same bytes from memory to one file, and sync it."""
    with path.open("wb", buffering=0) as file:
        for buffer in _buffers(state):
            while buffer:
                buffer = buffer[file.write(buffer) :]
        os.fsync(file.fileno())


def _read(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Read the same bytes into memory."""
    with path.open("rb", buffering=0) as file:
        for buffer in _buffers(state):
            while buffer:
                buffer = buffer[file.readinto(buffer) :]


def measure(directory: str, size_mb: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, those of `SAVES` first, on a single rank.

    Leaves run (zerokit), dcp (torch.save items) and dcp-hf (safetensors shards of the weights alone) in `directory`.
    """
    optimizer, _ = trained(size_mb, rows=2)
    # DCP gets tensors of the same sizes: names and values do not matter for its speed.
    weights = {name: each.detach() for name, each in optimizer.runtime.model.named_parameters()}
    state = {
        f"{kind}.{name}": tensor if kind == "weight" else torch.rand_like(tensor)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    run, other, plain = (Path(directory, name) for name in ("run", "dcp", "plain"))

    def save_by_dcp() -> None:
        dcp_save(state, checkpoint_id=str(other))
        os.sync()

    saves: dict[str, Callable[[], object]] = {
        "zerokit.save": partial(zerokit.save, run, optimizer, step=1),
        "dcp.save": save_by_dcp,
        "write and sync": partial(_write, plain, state),
    }
    loads: dict[str, Callable[[], object]] = {
        "zerokit.load": partial(zerokit.load, run, optimizer),
        "dcp.load": partial(dcp_load, state, checkpoint_id=str(other)),
        "read": partial(_read, plain, state),
    }
    places = {"zerokit.save": run, "dcp.save": other, "write and sync": plain}
    seconds = take_turns(saves, rounds, lambda name: empty(places[name])) | take_turns(loads, rounds)
    remove(plain)
    shards = HuggingFaceStorageWriter(str(Path(directory, "dcp-hf")), save_distributed=True)
    dcp_save(weights, storage_writer=shards)
    return seconds
