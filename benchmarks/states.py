"""Memory and seconds of steps whose masters and states are on a disk, beside a run with them on the device.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.states --states DIRECTORY --precision bf16

Prints JSON: for each home the highest resident memory of a rank above what it had before the model was built, the
formulas' prediction, the medians of passes and of steps, and the rate at which steps moved states.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from zerokit.runtime.homes.home import Home

MB = 1e6


class Transformer(nn.Module):
    """A decoder's parameters: about 12 · depth · width² of them beside the embedding."""

    def __init__(self, depth: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _resident(name: str) -> int:
    """Bytes that the system counts for this process: `VmRSS` now, `VmHWM` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def _measure(states: str, arguments: argparse.Namespace, run: Path) -> dict[str, object]:
    torch.manual_seed(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory begins anew
    before = _resident("VmRSS")
    with torch.device("meta"):
        model = Transformer(arguments.depth, arguments.width, arguments.vocabulary)
    optimizer = zerokit.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=arguments.stage,
        precision=arguments.precision,
        bucket_mb=arguments.bucket_mb,
        states=states,
        init_fn=_init,
    )
    built = _resident("VmHWM") - before
    tokens = torch.randint(0, arguments.vocabulary, (1, 16))
    passes, steps = [], []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        optimizer.backward(model(tokens))
        dist.barrier()
        middle = time.perf_counter()
        optimizer.step()
        dist.barrier()
        end = time.perf_counter()
        optimizer.zero_grad()
        passes.append(middle - begin)
        steps.append(end - middle)
    stepped = _resident("VmHWM") - before
    zerokit.save(run, optimizer, step=arguments.steps)
    saved = _resident("VmHWM") - before
    zerokit.load(run, optimizer)
    home: Home = optimizer.runtime.home
    moved = 2 * sum(
        tensor.nbytes for unit in optimizer.runtime.units for tensor in home.away(unit)
    )  # there and back
    step = statistics.median(steps[1:])
    memory = optimizer.memory()
    return {
        "parameters": sum(parameter.numel for parameter in optimizer.layout.parameters),
        "formula_MB": (memory.peak if hasattr(memory, "peak") else memory.total) / MB,
        "memory_MB": {name: size / MB for name, size in memory.as_dict().items() if size},
        "two_units_MB": home.most / MB,
        "peak_MB": {
            "built": built / MB,
            "stepped": stepped / MB,
            "saved": saved / MB,
            "loaded": (_resident("VmHWM") - before) / MB,
        },
        "pass_s": statistics.median(passes[1:]),
        "step_s": step,
        "moved_MB": moved / MB,
        "moved_GB_per_s": moved / step / 1e9,
    }


def _init(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", default=tempfile.gettempdir(), help="a directory on the disk to measure")
    parser.add_argument("--homes", nargs="+", default=["device", "disk"], choices=["device", "disk"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=12000)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    found: dict[str, object] = {"precision": arguments.precision, "stage": arguments.stage}
    for home in arguments.homes:
        run = Path(arguments.states) / "zerokit-benchmark-run"
        found[home] = _measure(arguments.states if home == "disk" else "device", arguments, run)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(run)
        dist.barrier()
    found["load"] = os.getloadavg()[0]
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
