"""Saving and loading from one training process, beside torch's DCP and the plain file system; prints JSON.

    python -m benchmarks.live_checkpoint DIRECTORY --size-gb 2 --repeats 5

Leaves DIRECTORY/run (zerokit), DIRECTORY/dcp (torch.save items) and DIRECTORY/dcp-hf (safetensors shards of the
weights alone). Times are of the calls, not of the process: both need torch imported and a model built.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import zerokit

_STATE_BYTES = 12
"""A parameter's: master and two moments of AdamW, in fp32."""

_WIDTH = 1024


class _Layers(nn.Module):
    """Square layers, each a unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _timed(task: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def _plain(path: Path, state: dict[str, torch.Tensor]) -> None:
    """The floor: the same bytes written from memory to one file, and synced."""
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            array: Any = tensor.detach().numpy()
            view = memoryview(array).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def measure(directory: Path, size_gb: float, repeats: int) -> dict[str, Any]:
    """Seconds of each call by name, and the bytes of the state."""
    torch.manual_seed(0)
    model = _Layers(max(1, round(size_gb * 1e9 / _STATE_BYTES / (_WIDTH * _WIDTH + _WIDTH))))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-3)
    optimizer.backward(model(torch.randn(2, _WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    # DCP gets tensors of the same sizes: names and values do not matter for its speed.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = {
        f"{kind}.{name}": tensor if kind == "weight" else torch.rand_like(tensor)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    run, other, plain = directory / "run", directory / "dcp", directory / "plain"

    def save_and_sync() -> None:
        dcp_save(state, checkpoint_id=str(other))
        os.sync()

    tasks: dict[str, Callable[[], object]] = {
        "write and sync": lambda: _plain(plain, state),
        "zerokit.save": lambda: zerokit.save(run, optimizer, step=1),
        "dcp.save": save_and_sync,
        "zerokit.load": lambda: zerokit.load(run, optimizer),
        "dcp.load": lambda: dcp_load(state, checkpoint_id=str(other)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(repeats):
        for leftover in (run, other):
            shutil.rmtree(leftover, ignore_errors=True)
        plain.unlink(missing_ok=True)
        names = list(tasks)
        saves, loads = names[:3], names[3:]
        for name in [*saves[:: 1 - 2 * (number % 2)], *loads[:: 1 - 2 * (number % 2)]]:
            seconds[name].append(_timed(tasks[name]))
    plain.unlink()
    shards = HuggingFaceStorageWriter(str(directory / "dcp-hf"), save_distributed=True)
    dcp_save(weights, storage_writer=shards)
    return {"bytes": sum(tensor.nbytes for tensor in state.values()), "seconds": seconds}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-gb", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    store = f"file://{options.directory.resolve()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        found = measure(options.directory, options.size_gb, options.repeats)
    finally:
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
