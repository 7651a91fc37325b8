"""Every engine trains the same model from the same weights on the same batches, so their losses agree."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.bench.ranks import import_optimizers
from tests.support.distributed import run_ranks
from zerokit.bench.catalogue import workloads as catalogue
from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.workloads import BertConfig, Config, GPTConfig, ResNetConfig, Workload
from zerokit.bench.engines.compute_only import ComputeOnlyTrainer
from zerokit.bench.engines.fsdp2 import TRAINS_ON_CPU
from zerokit.bench.engines.trainer import Batch, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Batches
from zerokit.bench.workloads.build import load

ROOT = Path(__file__).parents[3]
# fp32 sums in another order differ by some 1e-7; a wrong average or a lost gradient by 1e-3 and more.
TOLERANCE = 1e-5
# Engines round to bf16 at different places: autocast keeps fp32 parameters.
HALF_TOLERANCE = 2e-2
STEPS = 4

TINY = Settings(
    engine="zerokit",
    stage=2,
    model="gpt-tiny",
    precision="fp32",
    device="cpu",
    batch_size=2,
    seq_len=16,
    data=str(ROOT / "README.md"),  # real text, so that losses fall
    lr=1e-2,
    clip=0.5,
    nproc_per_node=2,
)
# DeepSpeed has an environment of its own, see `test_deepspeed_agrees`; torch 2.6's FSDP2 needs a GPU.
ELSEWHERE = ["compute-only", "post-local-sgd", "deepspeed", *([] if TRAINS_ON_CPU else ["fsdp2"])]
PEERS = [
    (name, stage) for name, engine in ENGINES.items() if name not in ELSEWHERE for stage in engine.stages
]
FEW_PEERS = [
    ("zerokit", 3),
    ("ddp", 0),
    ("zero-redundancy-optimizer", 1),
    *([("fsdp2", 3)] if TRAINS_ON_CPU else []),
    ("parameter-server", 0),
]
# The library's models, as small as they go: built on meta where the engine does that, with buffers, with BatchNorm.
SMALL: dict[str, Config] = {
    "small-gpt2": GPTConfig(vocabulary=300, positions=16, width=16, layers=2, heads=2),
    "small-bert": BertConfig(vocabulary=300, positions=16, width=16, layers=2, heads=2, hidden=32),
    "small-resnet": ResNetConfig((1, 1, 1, 1), (16, 16, 32, 32), stem=8, classes=10, image_size=32),
}
WITH_SMALL: dict[str, Workload] = {
    **catalogue.WORKLOADS,
    **{name: Workload(name, config, "transformers") for name, config in SMALL.items()},
}


class Curve(NamedTuple):
    """What one rank saw: its own losses, and the norms it knows."""

    losses: list[float]
    norms: list[float]


def start(settings: Settings) -> tuple[Trainer, Callable[[int], list[Batch]]]:
    """On a rank: a workload under an engine, and the rank's micro-batches by step."""
    loaded = load(settings)
    batches = Batches(loaded, settings, torch.device("cpu"), ahead=False)
    trainer = make(loaded, settings, Accelerator(torch.device("cpu"), "gloo"))
    return trainer, lambda step: batches.of(step * settings.samples_per_step)


def train(settings: Settings) -> Curve:
    """On a rank: some steps."""
    trainer, batches = start(settings)
    curve = Curve([], [])
    for step in range(STEPS):
        losses, norm = trainer.step(batches(step))
        curve.losses.extend(float(loss) for loss in losses)
        if norm is not None:
            curve.norms.append(float(norm))
    return curve


def train_all(settings: list[Settings]) -> list[Curve]:
    """On a rank: one bench after the other, in one process group."""
    catalogue.WORKLOADS = WITH_SMALL
    if any(one.engine == "zero-redundancy-optimizer" for one in settings):
        import_optimizers()
    return [train(one) for one in settings]


def curves(cells: list[Settings], world: int = 2) -> list[list[Curve]]:
    """By cell, by rank."""
    by_rank = run_ranks(world, train_all, cells)
    return [[rank[number] for rank in by_rank] for number in range(len(cells))]


def cells_of(peers: list[tuple[str, int]], base: Settings) -> list[Settings]:
    return [replace(base, engine=engine, stage=stage) for engine, stage in peers]


def require_agreement(cells: list[Settings], found: list[list[Curve]], tolerance: float = TOLERANCE) -> None:
    """Each rank's losses, and the norm where it is known, are those of the first cell."""
    for cell, ranks in zip(cells, found, strict=True):
        for rank, expected in zip(ranks, found[0], strict=True):
            assert rank.losses == pytest.approx(expected.losses, rel=tolerance), (cell.engine, cell.stage)
        assert ranks[0].norms == pytest.approx(found[0][0].norms, rel=tolerance), (cell.engine, cell.stage)


PLAIN, CLIPPED = replace(TINY, clip=None), TINY
BOTH = replace(TINY, accumulate=2)
AGREE = {
    "clipping and accumulation": cells_of(PEERS, BOTH),
    "neither": cells_of([("zerokit", 0), *FEW_PEERS], PLAIN),
    "gpt2": cells_of([("zerokit", 0), ("zerokit", 3), ("ddp", 0)], replace(TINY, model="small-gpt2")),
    "bert": cells_of([("zerokit", 0), ("zerokit", 3), *FEW_PEERS[3:-1]], replace(TINY, model="small-bert")),
    # A BatchNorm over few values would amplify the order of sums beyond any tolerance.
    "resnet": cells_of(
        [("zerokit", 0), *FEW_PEERS],
        replace(TINY, model="small-resnet", data="synthetic", batch_size=8, image_size=64, lr=1e-3),
    ),
}
"""Cells by what they train; the library's models only where the library is installed."""

OF_A_LIBRARY = ("gpt2", "bert", "resnet")
# Muon makes matrices orthogonal in bf16, where a sum in another order may round an element the other way.
MUON_TOLERANCE = 1e-4
MUON = cells_of([peer for peer in PEERS if peer[0] != "parameter-server"], replace(BOTH, optimizer="muon"))
HALF = cells_of([("zerokit", 2), *FEW_PEERS], replace(TINY, precision="bf16", lr=1e-3))
ALONE = replace(TINY, engine="compute-only", stage=0)
MUON_ALONE = [replace(ALONE, stage=stage, optimizer="muon") for stage in (0, 1)]
EXACT = replace(TINY, engine="ddp", stage=0)
WIRES = [replace(cell, wire=wire) for cell in (CLIPPED, EXACT) for wire in ("own", "bf16")]
POWERSGD = replace(EXACT, wire="powersgd")
LOCAL = replace(TINY, every=2)
NAMED, PEER = replace(LOCAL, mesh="2x1"), replace(LOCAL, engine="post-local-sgd", stage=0)
NARROW = [replace(LOCAL, wire=wire) for wire in ("int8", "int4")]


@pytest.fixture(scope="module")
def trained() -> dict[Settings, list[Curve]]:
    """What two ranks saw, all in one process group: importing torch's engines and the library takes long."""
    library = importlib.util.find_spec("transformers") is not None
    cells = [cell for name, cells in AGREE.items() if library or name not in OF_A_LIBRARY for cell in cells]
    cells += [*HALF, *MUON, *MUON_ALONE, ALONE, *WIRES, POWERSGD, LOCAL, NAMED, PEER, *NARROW]
    return dict(zip(cells, curves(cells), strict=True))


@pytest.mark.parametrize("case", AGREE)
def test_engines_agree(case: str, trained: dict[Settings, list[Curve]]) -> None:
    if case in OF_A_LIBRARY:
        pytest.importorskip("transformers")
    require_agreement(AGREE[case], [trained[cell] for cell in AGREE[case]])


def test_clipping_and_accumulation_are_no_trifles(trained: dict[Settings, list[Curve]]) -> None:
    """Were one of them left out by all engines alike, they would still agree."""
    clipped, plain, both = (
        trained[replace(cell, stage=stage)][0]
        for cell, stage in ((CLIPPED, 2), (PLAIN, 0), (BOTH, PEERS[0][1]))
    )
    assert [len(curve.losses) for curve in (clipped, plain, both)] == [STEPS, STEPS, 2 * STEPS]
    assert [len(curve.norms) for curve in (clipped, plain, both)] == [STEPS, 0, STEPS]
    for curve in (clipped, plain, both):
        assert curve.losses[-1] < curve.losses[0] - 0.1
    assert clipped.losses != pytest.approx(plain.losses, rel=10 * TOLERANCE)
    assert clipped.losses != pytest.approx(both.losses[::2], rel=10 * TOLERANCE)


def test_engines_agree_in_half_precision_as_far_as_it_goes(trained: dict[Settings, list[Curve]]) -> None:
    require_agreement(HALF, [trained[cell] for cell in HALF], HALF_TOLERANCE)


def test_the_bf16_wire_is_near_the_engines_own(trained: dict[Settings, list[Curve]]) -> None:
    found = [trained[cell] for cell in WIRES]
    require_agreement(WIRES, found, HALF_TOLERANCE)
    for own, bf16 in (found[:2], found[2:]):
        assert own[0].losses != bf16[0].losses


def test_powersgd_begins_with_exact_steps_and_trains_on(trained: dict[Settings, list[Curve]]) -> None:
    first, second = trained[EXACT][0], trained[POWERSGD][0]
    # The hook compresses from step 3 on.
    assert second.losses[:3] == pytest.approx(first.losses[:3], rel=TOLERANCE)
    assert second.losses[3] != first.losses[3]
    assert second.losses[3] == pytest.approx(first.losses[3], rel=0.1)


def test_engines_agree_about_muon(trained: dict[Settings, list[Curve]]) -> None:
    require_agreement(MUON, [trained[cell] for cell in MUON], MUON_TOLERANCE)
    own = [trained[cell] for cell in MUON if cell.engine == "zerokit"]
    assert len(own) == 4
    assert all(stage == own[0] for stage in own)  # to the bit
    muon, adamw = (trained[cell][0] for cell in (MUON[0], replace(MUON[0], optimizer="adamw")))
    assert muon.losses[0] == adamw.losses[0]
    assert muon.losses[2:] != pytest.approx(adamw.losses[2:], rel=10 * MUON_TOLERANCE)
    assert muon.losses[-1] < muon.losses[0] - 0.1


def test_compute_only_shares_out_whole_matrices(trained: dict[Settings, list[Curve]]) -> None:
    """Its ranks train alone: the one that has fewer matrices has other losses from the second step on."""
    (whole, _), (part, _) = (trained[cell] for cell in MUON_ALONE)
    assert part.losses[0] == whole.losses[0]
    assert part.losses[1:] != whole.losses[1:]
    assert part.losses[-1] < part.losses[0]


def test_compute_only_is_one_process_alone(trained: dict[Settings, list[Curve]]) -> None:
    alone = run_ranks(1, train_all, [TINY])[0][0]  # with the batches of the first of two ranks
    first, second = trained[ALONE]
    assert first.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert first.norms == pytest.approx(alone.norms, rel=TOLERANCE)
    assert second.losses != pytest.approx(alone.losses, rel=TOLERANCE)  # it has other batches


def test_engines_agree_on_three_ranks_that_divide_nothing_evenly() -> None:
    base = replace(TINY, model="llama-tiny", nproc_per_node=3)
    cells = cells_of([("zerokit", 0), *FEW_PEERS], base)
    require_agreement(cells, curves(cells, world=3))


def moved(settings: list[Settings]) -> list[list[list[bool]]]:
    """On a rank: which elements of each parameter some steps have changed, for each of the settings."""
    found = []
    for one in settings:
        trainer, batches = start(one)
        assert isinstance(trainer, ComputeOnlyTrainer)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        for step in range(STEPS):
            _, norm = trainer.step(batches(step))
        assert norm is not None
        assert math.isfinite(norm)
        # The scale of the loss in fp16 starts too high on purpose.
        assert 0 < trainer.skipped_steps < STEPS if one.precision == "fp16" else trainer.skipped_steps == 0
        pairs = zip(before, trainer.model.parameters(), strict=True)
        found.append([(old != new).flatten().tolist() for old, new in pairs])
    return found


def test_compute_only_steps_a_share_of_every_parameter_beyond_stage_zero() -> None:
    base = replace(
        TINY, model="mlp-mnist", data="synthetic", engine="compute-only", stage=1, nproc_per_node=3
    )
    by_rank = run_ranks(3, moved, [replace(base, precision=precision) for precision in ("fp32", "fp16")])
    for shares in zip(*((part for parts in rank for part in parts) for rank in by_rank), strict=True):
        numel = len(shares[0])
        for rank, part in enumerate(shares):
            start, stop = rank * numel // 3, (rank + 1) * numel // 3
            assert not any([*part[:start], *part[stop:]])
        # A rank's own share has moved, but for pixels without a gradient.
        assert all(any(part) for part in shares)


def test_nobodys_memory_includes_anothers_modules() -> None:
    """A worker that trains with DDP has loaded neither zerokit's runtime nor what other peers need."""
    program = (
        "import sys, zerokit.bench.worker, zerokit.bench.engines.ddp\n"
        "names = ('zerokit.runtime', 'zerokit.checkpoint', 'torch.distributed.optim', 'torch.distributed.fsdp',"
        " 'transformers', 'mlflow', 'deepspeed')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def train_beside_ddp(cells: list[Settings]) -> list[Curve]:
    """On a rank: DeepSpeed's imports and initialisation warn of many things, and it wants a launcher's variable."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train(one) for one in cells]


@pytest.mark.skipif(ENGINES["deepspeed"].missing is not None, reason="deepspeed is not installed")
def test_deepspeed_agrees() -> None:
    peers = [("ddp", 0), *(("deepspeed", stage) for stage in range(4))]
    half = replace(TINY, precision="bf16", lr=1e-3)
    kinds = [PLAIN, CLIPPED, BOTH, half, replace(TINY, bucket_mb=0.01)]
    variants = [cells_of(peers, variant) for variant in kinds]
    by_rank = run_ranks(2, train_beside_ddp, [cell for cells in variants for cell in cells])
    for rank in by_rank:
        found = iter(rank)
        for cells in variants:
            expected, *others = [next(found) for _ in cells]
            tolerance = HALF_TOLERANCE if cells[0].precision == "bf16" else TOLERANCE
            for cell, curve in zip(cells[1:], others, strict=True):
                assert curve.losses == pytest.approx(expected.losses, rel=tolerance), cell
                # In fp32 at stage 0 DeepSpeed does not tell the norm, and in bf16 it sums gradients in bf16.
                if curve.norms and cell.precision == "fp32":
                    assert curve.norms == pytest.approx(expected.norms, rel=tolerance), cell


def test_local_steps_are_another_training(trained: dict[Settings, list[Curve]]) -> None:
    own, peer, int8, int4 = (trained[cell] for cell in (LOCAL, PEER, *NARROW))
    assert own == trained[NAMED]
    assert len({tuple(found[0].losses) for found in (own, int8, int4)}) == 3
    every_step = trained[CLIPPED][0].losses
    for found in (own, peer, int8, int4):
        assert found[0].losses[:1] == every_step[:1]
        assert found[0].losses != every_step
        assert found[0].losses[-1] < found[0].losses[0]
