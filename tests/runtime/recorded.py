"""What training did on 2026-11-27, before the runtime was redesigned: losses, norms, weights, memory, traffic, files.

    python -m tests.runtime.recorded            compare all of it with recorded.json
    python -m tests.runtime.recorded --write    record anew

Bits belong to a machine and a version of PyTorch: `MACHINE` tells both, by what plain PyTorch computes there. On
another one only what does not depend on arithmetic is compared: memory and traffic.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    one_step,
    wrap,
)

#: Of `memory()` then, in this order; those that are gone since were 0.
LINES = (
    *("parameters", "gradients", "optimizer", "frozen", "buffers", "scalars", "padding", "buckets"),
    *("gathered", "host_copy", "residual", "transient"),
)
FILE = Path(__file__).with_suffix(".json")
MACHINE = "machine"
#: Tied, frozen, in groups, recomputed, left out on one rank or on all: whatever the order of units depends on.
NAMES = (
    "gpt",
    "gpt_groups",
    "gpt_checkpoint_each",
    "unit_unused_on_one_rank",
    "unused_everywhere",
    "tied_blocks",
    "tied_inside",
    "tiny_parameters",
    "lora",
)
LOOPS = {
    "plain": Run(steps=3),
    "clipped": Run(steps=3, clip=0.3),
    "accumulated": Run(steps=2, clip=math.inf, micro=3, accumulate=True),
    "repeated": Run(steps=2, clip=math.inf, micro=2),
    "bf16": Run(steps=3, clip=0.3, precision="bf16"),
    "fp16": Run(steps=3, clip=0.3, precision="fp16"),
}
#: Ranks, or a mesh of them, and stages; other worlds than two take two of these by turns.
WORLDS: dict[str, tuple[int, tuple[int, int] | None, tuple[Any, ...]]] = {
    "1": (1, None, (0, 1, 2, 3)),
    "2": (2, None, (0, 1, 2, 3)),
    "3": (3, None, (0, 1, 2, 3)),
    "2x2": (4, (2, 2), ((0, 0), (0, 3), (1, 3), (2, 3), (1, 2), (3, 3))),
}


@dataclass(frozen=True)
class Scene:
    """One training; its results are recorded under `key`, and those that no stage may change under `name`."""

    world: str
    model: str
    loop: str
    run: Run

    @property
    def name(self) -> str:
        return f"{self.world} {self.model} {self.loop}"

    @property
    def key(self) -> str:
        return f"{self.name} stage {self.run.stage}"


def scenes(world: str) -> Iterator[Scene]:
    """The trainings of a world."""
    _, mesh, stages = WORLDS[world]
    for at, name in enumerate(NAMES):
        for number, (loop, run) in enumerate(LOOPS.items()):
            turn = at + number
            chosen = stages if world == "2" else dict.fromkeys((stages[turn % len(stages)], stages[-1]))
            for stage in chosen:
                yield Scene(world, name, loop, replace(run, stage=stage, mesh=mesh, bucket_mb=SMALL))


def hash_of(value: Any) -> str:
    """Sixteen digits for what is long."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def train(scene: Scene, folder: str) -> dict[str, Any]:
    """On a rank: what a training leaves behind. Rank 0 adds the files of a save."""
    case, run = CASES[scene.model], scene.run
    model = build_seeded(case, dist.get_rank())
    optimizer = wrap(model, case, run)
    trajectory = Trajectory()
    for step in range(run.steps):
        if step == run.steps - 1:
            # A step by halves: memory is defined between backward and step.
            for micro in range(run.micro - 1):
                with optimizer.accumulate():
                    optimizer.backward(case.loss(model, case.batch(run.seed, 100 + micro, dist.get_rank())))
            optimizer.backward(case.loss(model, case.batch(run.seed, 99, dist.get_rank())))
            held = optimizer.memory().as_dict()
            memory = {line: held.get(line, 0) for line in LINES}
            optimizer.zero_grad()
        one_step(model, optimizer, case, run, step, trajectory)
    traffic = optimizer.traffic().as_dict()
    del traffic["control_bytes"]  # the size of a step's agreement, which is no result
    path = Path(folder) / hash_of(scene.key)
    zerokit.save(path, optimizer, step=run.steps, extra={"scene": scene.name})
    with optimizer.gathered(), torch.no_grad():  # as they are computed with
        trajectory.weights = digest((name, weight.clone()) for name, weight in model.named_parameters())
    dist.barrier()
    files = {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("rank-*.safetensors") if dist.get_rank() == 0 else ())
    }
    return {"bits": trajectory.bits(), "memory": memory, "traffic": traffic, "files": files}


def train_scenes(chosen: list[Scene], folder: str) -> dict[str, dict[str, Any]]:
    """On a rank: the results of several trainings."""
    found = {}
    for scene in chosen:
        try:
            found[scene.key] = train(scene, folder)
        except BaseException as error:
            error.add_note(f"in {scene.key}")
            raise
    return found


def record(world: str, chosen: list[Scene]) -> dict[str, Any]:
    """All ranks' results by scene, in the form of the file."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(WORLDS[world][0], train_scenes, chosen, folder)
    found: dict[str, Any] = {}
    for scene in chosen:
        results = [rank[scene.key] for rank in ranks]
        bits = {
            "first loss": results[0]["bits"][0],
            "bits": hash_of([each["bits"] for each in results]),
            "files": hash_of(results[0]["files"]),
        }
        known = found.setdefault(scene.name, bits)
        assert known == bits, f"{scene.key}: {bits}, at an earlier stage {known}"
        total = sum(sum(each["memory"].values()) for each in results), results[0]["traffic"]["elements"]
        found[scene.key] = {
            "bytes and elements": list(total),
            "memory and traffic": hash_of([[each["memory"], each["traffic"]] for each in results]),
        }
    return found


def fingerprint() -> str:
    """What plain PyTorch computes here: equal where bits can be compared."""
    return hash_of([run_alone(_train_plainly, dtype) for dtype in ("float32", "bfloat16")])


def _train_plainly(dtype: str) -> list[str]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(5):
        loss = layer(torch.randn(3, 17, 32, dtype=getattr(torch, dtype))).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(found: dict[str, Any], recorded: dict[str, Any], *, same_machine: bool) -> list[str]:
    """Names of scenes whose results are not the recorded ones."""
    counted = ("bytes and elements", "memory and traffic")
    kinds = ("first loss", "bits", "files", *counted) if same_machine else counted
    return [
        f"{key}: {kind} {result[kind]}, recorded {recorded[key][kind]}"
        for key, result in found.items()
        for kind in kinds
        if kind in result and result[kind] != recorded[key][kind]
    ]


def main() -> int:
    """Compare everything, or write it. Returns 1 where something differs."""
    machine = fingerprint()
    found: dict[str, Any] = {}
    for world in WORLDS:
        found |= record(world, list(scenes(world)))
        print(f"world {world}: {len(found)} results so far", file=sys.stderr)
    if "--write" in sys.argv:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
        text = ",\n".join([f"{json.dumps(MACHINE)}: {json.dumps(machine)}", *lines])
        FILE.write_text("{\n" + text + "\n}\n")
        return 0
    recorded = json.loads(FILE.read_text())
    wrong = differences(found, recorded, same_machine=machine == recorded[MACHINE])
    print(*wrong, f"{len(found)} results, {len(wrong)} differ", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
