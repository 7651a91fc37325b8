"""Saving and loading from one training process, beside torch's DCP and the plain file system.

Times are of the calls, not of the process: both need torch imported and a model built.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import in_rounds

if TYPE_CHECKING:
    import torch

_STATE_BYTES = 12
"""A parameter's: master and two moments of AdamW, in fp32."""

_WIDTH = 1024


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _plain(path: Path, state: dict[str, torch.Tensor]) -> None:
    """The floor: the same bytes written from memory to one file, and synced."""
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            array: Any = tensor.detach().numpy()
            view = memoryview(array).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def measure(directory: str, size_gb: float, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call by name, on a single rank.

    Leaves run (zerokit), dcp (torch.save items) and dcp-hf (safetensors shards of the weights alone) in `directory`.
    """
    import torch
    from torch import nn
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import zerokit

    torch.manual_seed(0)
    count = max(1, round(size_gb * 1e9 / _STATE_BYTES / (_WIDTH * _WIDTH + _WIDTH)))
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(count)]
    for layer in layers:
        nn.init.normal_(
            layer.weight, std=_WIDTH**-0.5
        )  # no layer makes numbers smaller: all states are dense
    model = nn.Sequential(*layers)
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
    run, other, plain = (Path(directory, name) for name in ("run", "dcp", "plain"))

    def save_and_sync() -> None:
        dcp_save(state, checkpoint_id=str(other))
        os.sync()

    saves: dict[str, tuple[Path, Callable[[], object]]] = {
        "write and sync": (plain, partial(_plain, plain, state)),
        "zerokit.save": (run, partial(zerokit.save, run, optimizer, step=1)),
        "dcp.save": (other, save_and_sync),
    }
    loads: dict[str, Callable[[], object]] = {
        "zerokit.load": partial(zerokit.load, run, optimizer),
        "dcp.load": partial(dcp_load, state, checkpoint_id=str(other)),
    }

    def save(name: str) -> float:
        path, task = saves[name]
        remove(path)
        return _timed(task)

    seconds = in_rounds(list(saves), repeats, save)
    seconds |= in_rounds(list(loads), repeats, lambda name: _timed(loads[name]))
    remove(plain)
    shards = HuggingFaceStorageWriter(str(Path(directory, "dcp-hf")), save_distributed=True)
    dcp_save(weights, storage_writer=shards)
    return seconds


def _timed(task: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    task()
    return time.perf_counter() - started
