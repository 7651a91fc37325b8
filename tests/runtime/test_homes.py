"""States on a disk: the bits, files and memory of a run whose states are on the device."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(3)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def _classes(name: str, model: nn.Module) -> Any:
    if name == "adamw":
        return torch.optim.AdamW
    if name == "momentum":
        return torch.optim.SGD
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "blocks" not in n]
    if name == "muon":
        return {torch.optim.Muon: [{"params": matrices, "lr": 0.02}], torch.optim.AdamW: rest}
    import pytorch_optimizer

    own = {"soap": pytorch_optimizer.SOAP, "adafactor": pytorch_optimizer.AdaFactor}.get(name)
    if own is not None:
        return {own: matrices, torch.optim.AdamW: rest}
    return pytorch_optimizer.ScheduleFreeAdamW


def _build(states: Any, name: str = "adamw", **given: Any) -> tuple[Net, zerokit.ZeroOptimizer]:
    model = Net()
    options: dict[str, Any] = {"stage": 2, "precision": "fp32", "bucket_mb": 0.005} | given
    classes = _classes(name, model)
    if not isinstance(classes, dict):
        options["lr"] = 3e-3
    if name == "momentum":
        options["momentum"] = 0.9
    return model, zerokit.ZeroOptimizer(model, classes, states=states, **options)


def _tokens(number: int, part: int = 0) -> Tensor:
    seed = 1000 * number + 10 * part + dist.get_rank()
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(seed))


def _train(
    model: Net,
    optimizer: zerokit.ZeroOptimizer,
    numbers: range,
    *,
    parts: int = 1,
    count: bool = False,
    overflow: int | None = None,
    freeze: int | None = None,
) -> list[float]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for number in numbers:
        if number == freeze:
            model.get_parameter("blocks.1.0.weight").requires_grad_(False)
        for part in range(parts):
            with optimizer.accumulate() if part + 1 < parts else nullcontext():
                loss = model(_tokens(number, part))
                if number == overflow and dist.get_rank() == 1:
                    loss = loss * float("inf")
                optimizer.backward(loss * 6 if count else loss, count=6 + dist.get_rank() if count else None)
                losses.append(loss.item())
        optimizer.clip_grad_norm_(0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "gradients are inf or nan")
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if optimizer.ema is not None:
            optimizer.ema.update()
    return losses


def _weights(optimizer: zerokit.ZeroOptimizer) -> list[Tensor]:
    return [weight.clone() for _, weight in optimizer.weights(torch.float32)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


def _home(directory: Path) -> str:
    home = directory / "states"
    home.mkdir(exist_ok=True)
    dist.barrier()
    return str(home)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[({"stage": stage}, {"parts": 2}) for stage in range(4)],
    *[({"stage": stage, "precision": "bf16"}, {"count": True}) for stage in range(4)],
    ({"stage": 3, "precision": "fp16"}, {"overflow": 2}),
    ({"stage": 2, "precision": "fp16"}, {}),
    ({"precision": "bf16"}, {"overflow": 0}),
    ({"stage": 1, "precision": "bf16", "bucket_mb": 64}, {"freeze": 2}),
    ({"stage": 3, "precision": "bf16", "name": "momentum"}, {"freeze": 1}),
    *[({"name": "muon", "stage": stage, "precision": "bf16"}, {"freeze": 3}) for stage in (0, 2, 3)],
    *[({"name": name, "stage": 2}, {"parts": 2}) for name in ("soap", "adafactor")],
]


@on_ranks(2, cases=CASES)
def test_training_has_the_same_bits(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    _compare(case, _home(tmp_path))


@on_ranks(
    4,
    cases=[
        ({"mesh": (2, 2), "stage": (0, 3), "precision": "bf16"}, {}),
        ({"mesh": (2, 2), "stage": (1, 3)}, {"freeze": 1}),
        ({"mesh": (2, 2), "stage": (1, 2), "name": "muon"}, {"count": True}),
        ({"stage": 3, "precision": "bf16"}, {}),
    ],
)
def test_meshes_have_the_same_bits(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    _compare(case, _home(tmp_path))


def _compare(case: tuple[dict[str, Any], dict[str, Any]], home: str) -> None:
    options, loop = case
    found = []
    for states in ("device", home):
        model, optimizer = _build(states, **options)
        average = zerokit.Ema(optimizer, 0.9)
        losses = _train(model, optimizer, range(3), **loop)
        with optimizer.gathered(), torch.no_grad():
            model.head.weight.mul_(0.5)
        average.restart()
        losses += _train(model, optimizer, range(3, 5), **loop)
        mine = copy.deepcopy(optimizer.state_dict())  # on the device it shares memory
        losses += _train(model, optimizer, range(5, 7), **loop)
        weights = _weights(optimizer)
        with average.applied():
            weights += _weights(optimizer)
        if options.get("name") != "adafactor":  # torch casts its momentum in bf16 when it loads
            optimizer.load_state_dict(mine)
            _train(model, optimizer, range(5, 7), **loop)
            assert _same(_weights(optimizer), weights[: len(weights) // 2])
        found.append((losses, weights))
    assert found[0][0] == found[1][0]
    assert _same(found[0][1], found[1][1])
    assert os.listdir(home) == []


@on_ranks(2)
def test_schedule_free_optimizers_switch_their_weights(tmp_path: Path) -> None:
    found = []
    for states in ("device", _home(tmp_path)):
        model, optimizer = _build(states, "schedule-free", precision="bf16", stage=3)
        for number in range(3):
            optimizer.train()
            _train(model, optimizer, range(number, number + 1))
            optimizer.eval()
            found.append(_weights(optimizer))
    assert all(map(_same, found[:3], found[3:]))


@on_ranks(2)
def test_an_accumulated_step_reads_and_writes_once(tmp_path: Path) -> None:
    model, optimizer = _build(_home(tmp_path), precision="bf16")
    _train(model, optimizer, range(2))
    counts = []
    for parts in (1, 4):
        watched = partial(patch.object, os)
        with (
            watched("preadv", side_effect=os.preadv) as reads,
            watched("pwritev", side_effect=os.pwritev) as writes,
        ):
            _train(model, optimizer, range(2, 3), parts=parts)
        counts.append((reads.call_count, writes.call_count))
    units = len(optimizer.layout.units)
    assert counts == [(units, units)] * 2


def _digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


@on_ranks(2, cases=[("adamw", "bf16", 3), ("adamw", "fp32", 1), ("muon", "bf16", 2), ("soap", "fp32", 2)])
def test_saves_are_the_same_and_load_into_either(case: tuple[str, str, int], tmp_path: Path) -> None:
    name, precision, stage = case
    home, found = _home(tmp_path), []
    for states, other in (("device", home), (home, "device")):
        model, optimizer = _build(states, name, precision=precision, stage=stage)
        _train(model, optimizer, range(3))
        run = tmp_path / f"{name}-{precision}-{'device' if states == 'device' else 'disk'}"
        torch.manual_seed(5)
        zerokit.save(run, optimizer, step=3)
        saving = zerokit.save(run, optimizer, step=4, blocking=False)
        _train(model, optimizer, range(3, 5))
        saving.wait()
        weights = _weights(optimizer)
        model, optimizer = _build(other, name, precision=precision, stage=stage)
        zerokit.load(run / "step-00000003", optimizer)
        _train(model, optimizer, range(3, 5))
        assert _same(_weights(optimizer), weights)
        found.append([_digests(run / f"step-{step:08}") for step in (3, 4)])
    assert found[0] == found[1]
    assert os.listdir(home) == []


def _write(directory: Path) -> None:
    model, optimizer = _build(_home(directory), "muon", precision="bf16", stage=3)
    _train(model, optimizer, range(2))
    zerokit.save(directory / "run", optimizer, step=2)


def _read(directory: Path) -> None:
    found = []
    for states in ("device", _home(directory)):
        model, optimizer = _build(states, "muon", precision="bf16", stage=1)
        zerokit.load(directory / "run", optimizer)
        _train(model, optimizer, range(2, 4))
        found.append(_weights(optimizer))
    assert _same(*found)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    run_ranks(4, _write, tmp_path)
    run_ranks(3, _read, tmp_path)


@on_ranks(4)
def test_local_steps_have_the_same_bits(tmp_path: Path) -> None:
    found = []
    for states in ("device", _home(tmp_path)):
        torch.manual_seed(0)
        model, optimizer = _build(states, precision="bf16", mesh=(2, 2), stage=("local", 3))
        local = zerokit.LocalSteps(optimizer, every=2)
        for number in range(5):
            _train(model, optimizer, range(number, number + 1))
        local.synchronize()
        found.append(_weights(optimizer))
    assert _same(*found)


@on_ranks(2)
def test_a_released_model_is_plain_and_its_file_empty(tmp_path: Path) -> None:
    found = []
    for states in ("device", _home(tmp_path)):
        model, optimizer = _build(states, precision="bf16")
        _train(model, optimizer, range(2))
        home: Any = optimizer.runtime.home
        zerokit.release(model)
        found.append([p.detach().clone() for p in model.parameters()])
        if states != "device":
            assert home.file.size == 0
    assert _same(*found)
