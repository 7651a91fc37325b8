"""`memory()` and `traffic()` where tensors are updated whole: equal to predictions and to what is held and sent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerokit
from tests.runtime.test_accounts import PAIRS, STAGES
from tests.support.distributed import run_alone, run_ranks
from tests.support.machine import held_bytes, live_storages
from tests.support.on_ranks import on_ranks
from tests.support.training import LARGE, Run, Trajectory, mixed, one_step, trained
from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.owners import Shape
from zerokit.runtime.trials import WholeStates, tensors_in

HALF = zerokit.Precision(compute="bf16", reduce="bf16")
NARROW = zerokit.Precision(compute="fp32", reduce="bf16")
ROWS = {"blocks.0.inner.weight": 2, "stem.weight": (5, 7)}

ACCOUNTS: dict[int, list[tuple[str, Run, Sequence[Any]]]] = {
    1: [("odd_shapes", Run(optimizer="muon"), STAGES), ("odd_shapes", Run(optimizer="soap"), (0, 3))],
    2: [
        ("odd_shapes", Run(optimizer="muon"), STAGES),
        ("odd_shapes", Run(optimizer="adafactor", precision="bf16"), STAGES),
        ("odd_shapes", Run(optimizer="soap", precision="fp16", bucket_mb=LARGE), STAGES),
        ("odd_shapes", Run(optimizer="lamb", precision=HALF), STAGES),
        ("odd_shapes", Run(optimizer="lamb", precision=NARROW, bucket_mb=0.001), STAGES),
        (
            "gpt",
            Run(optimizer="muon", precision="bf16", micro=2),
            [mixed("gpt", 3, 2), mixed("gpt", 0, 3, 1)],
        ),
        ("lora", Run(optimizer="muon"), (1, 3)),
    ],
    3: [
        ("odd_shapes", Run(optimizer="muon", precision="bf16", bucket_mb=LARGE), STAGES),
        ("odd_shapes", Run(optimizer="lamb"), STAGES),
        ("unit_unused_on_rank_1", Run(optimizer="muon", micro=2, accumulate=True), STAGES),
    ],
    4: [
        ("odd_shapes", Run(optimizer="muon", mesh=(2, 2)), PAIRS),
        ("odd_shapes", Run(optimizer="soap", mesh=(2, 2), precision="bf16"), [(0, 3), (1, 3), (2, 2)]),
        ("gpt", Run(optimizer="muon", mesh=(2, 2)), [mixed("gpt", (0, 3), (1, 2), (3, 3))]),
        ("odd_shapes", Run(optimizer="adafactor"), STAGES),
    ],
}

Account = tuple[MemoryReport, MemoryReport, TrafficReport, TrafficReport, int]
"""Memory and traffic, each beside its prediction, and the elements of tensors that are updated whole."""


def _account(name: str, run: Run, **options: Any) -> Account:
    if name == "odd_shapes":
        options["row_blocks"] = ROWS
    if run.precision == "fp16":
        options["loss_scale"] = zerokit.LossScale(128.0)  # no step is left out
    averaged = run.optimizer != "muon"  # the others have an average as well
    case, model, optimizer = trained(name, run, 0, **options)
    ema = zerokit.Ema(optimizer) if averaged else None
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
        if ema is not None:
            ema.update()
    reductions = 1 if run.accumulate else run.micro
    moved = optimizer.traffic()
    predicted = optimizer.predicted_traffic(micro_batches=run.micro, reductions=reductions)
    optimizer.backward(case.loss(model, case.batch(0, 9, dist.get_rank())))
    owners = optimizer.runtime.owners
    whole = sum(tensor.interval.numel for index in owners.units for tensor in owners.of_unit(index))
    return optimizer.memory(), optimizer.predicted_memory(), moved, predicted, whole


def _accounts_of(world: int) -> list[list[Account]]:
    return [
        [_account(name, replace(run, stage=stage)) for stage in stages]
        for name, run, stages in ACCOUNTS[world]
    ]


@pytest.mark.full(default="2")
@pytest.mark.parametrize("world", ACCOUNTS)
def test_memory_and_traffic_equal_predictions(world: int) -> None:
    found = run_ranks(world, _accounts_of, world)
    for number, (name, run, stages) in enumerate(ACCOUNTS[world]):
        for place, stage in enumerate(stages):
            what = name, run, stage
            for held, held_then, moved, moved_then, whole in (found[r][number][place] for r in range(world)):
                assert held == held_then, what
                assert held.total == sum(held.as_dict().values()) - held.transient - held.exchange
                assert moved.by_operation == moved_then.by_operation, what
                exchanged = [
                    sum(one.elements for name, one in moved.by_operation.items() if name.startswith(way))
                    for way in ("to_owners", "from_owners")
                ]
                assert exchanged[0] == exchanged[1], what
                if not run.mesh and not isinstance(stage, dict):
                    assert sum(exchanged) <= 2 * whole * (world - 1) / world, what
                    moves = stage > 0 and world > 1
                    # Small tensors lie in one piece each.
                    assert not exchanged[0] if not moves or name == "lora" else exchanged[0], what


def _received(run: Run) -> tuple[int, int]:
    _, _, optimizer = trained("odd_shapes", run, 3)
    moved = optimizer.traffic()
    ways = [one for name, one in moved.by_operation.items() if name.partition("_owners")[1]]
    return moved.received_bytes, sum(one.bytes for one in ways)


def _received_with_and_without(mesh: Any, stages: Sequence[Any]) -> list[tuple[int, int, int]]:
    found = []
    for stage in stages:
        run = Run(stage=stage, mesh=mesh, precision="bf16")
        received, exchanged = _received(replace(run, optimizer="lamb"))
        found.append((received, _received(run)[0], exchanged))
    return found


@pytest.mark.full(default="3-*")
@pytest.mark.parametrize(
    ("world", "mesh", "stages"), [(3, None, STAGES), (4, (2, 2), [(0, 3), (1, 3), (2, 2)])]
)
def test_what_ranks_receive_is_what_all_of_them_move(world: int, mesh: Any, stages: Sequence[Any]) -> None:
    """Beside what the same model moves with an elementwise optimizer."""
    ranks = run_ranks(world, _received_with_and_without, mesh, stages)
    for number, stage in enumerate(stages):
        more = [received - without for received, without, _ in (rank[number] for rank in ranks)]
        assert min(more) >= 0
        assert sum(more) == ranks[0][number][2], stage
        assert bool(sum(more)) == (stage != 0)


def _faked(world: int, mesh: tuple[int, int] | None) -> None:
    for rank in (0, world // 3, world - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        for number, stage in enumerate(PAIRS if mesh else STAGES):
            name = ("muon", "adafactor", "soap", "lamb")[(number + rank) % 4]
            for model, precision in (("odd_shapes", "fp32"), ("mlp_784_256_10", "bf16")):
                run = Run(stage=stage, mesh=mesh, optimizer=name, precision=precision)
                held, predicted, moved, expected, _ = _account(model, run, on_nonfinite="ignore")
                assert held == predicted, (name, stage, rank)
                assert moved.by_operation == expected.by_operation, (name, stage, rank)
        dist.destroy_process_group()


@pytest.mark.full(default="64-None")
@pytest.mark.parametrize(("world", "mesh"), [(64, None), (64, (8, 8))])
def test_world_sizes_that_only_a_fake_process_group_has(world: int, mesh: tuple[int, int] | None) -> None:
    run_alone(_faked, world, mesh)


@on_ranks(2, [("muon", "fp32", (0, 2, 3)), ("soap", "bf16", (1, 3))])
def test_memory_is_what_the_interpreter_holds(given: tuple[str, str, Sequence[int]]) -> None:
    """Every storage of a live tensor is in the report, and those of a step are in its line `exchange`."""
    name, precision, stages = given
    for stage in stages:
        before = set(live_storages())
        run = Run(stage=stage, precision=precision, optimizer=name)
        case, model, optimizer = trained("odd_shapes", run, 3)
        optimizer.backward(case.loss(model, case.batch(0, 9, dist.get_rank())))
        held, slack = held_bytes(before)
        reported = optimizer.memory().total
        assert abs(held - reported) <= slack + 4096, (stage, held, reported)
        del case, model, optimizer


@on_ranks(3, STAGES)
def test_what_lives_in_a_step_is_what_the_report_says(stage: int) -> None:
    run = Run(stage=stage, optimizer="muon")
    case, model, optimizer = trained("odd_shapes", run, 2)
    seen = [0]
    before: set[int] = set()

    def look(*_: Any) -> None:
        seen.append(sum(live_storages(before).values()))

    for part in optimizer.runtime.parts:
        part.optimizer.register_step_pre_hook(look)
    optimizer.backward(case.loss(model, case.batch(0, 9, dist.get_rank())))
    before |= set(live_storages())
    optimizer.step()
    reported = optimizer.memory().exchange
    assert reported == optimizer.predicted_memory().exchange
    assert reported <= max(seen) < reported + 128, (stage, max(seen), reported)  # numbers of the agreement


def _adamuon(params: list[nn.Parameter]) -> Optimizer:
    made: Optimizer = pytorch_optimizer.AdaMuon([{"params": params, "use_muon": True}])
    return made


CLASSES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": torch.optim.Muon,
    "adafactor": torch.optim.Adafactor,
    "soap": pytorch_optimizer.SOAP,
    "soap that leaves out large factors": functools.partial(pytorch_optimizer.SOAP, max_precondition_dim=16),
    "lamb": pytorch_optimizer.Lamb,
    "adafactor with rows and columns": pytorch_optimizer.AdaFactor,
    "came": pytorch_optimizer.CAME,
    "shampoo": pytorch_optimizer.Shampoo,
    "adamuon, one state flat": _adamuon,
}


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are known to update tensors by themselves: the trial of that takes seconds."""
    monkeypatch.setattr(WholeStates, "_require_apart", lambda self, name: None)


@pytest.mark.parametrize("name", CLASSES)
def test_sizes_of_states_are_those_of_a_step(name: str, untried: None) -> None:
    states = WholeStates(name, CLASSES[name], torch.float32)
    shapes: list[Shape] = [(16, 24), (40, 8), (1, 20), (20, 1)]
    if "muon" not in name:
        shapes += [(), (1,), (7,), (3, 4, 5), (2, 3, 1, 4)]
    for shape in shapes:
        tensor = nn.Parameter(torch.randn(shape))
        optimizer = CLASSES[name]([tensor])
        for _ in range(2):
            tensor.grad = torch.randn(shape)
            optimizer.step()
        kept = list(tensors_in(list(optimizer.state[tensor].values())))
        single = sum(value.nbytes for value in kept if not value.dim())
        assert states.nbytes(shape) == (sum(value.nbytes for value in kept), single), shape


def test_sizes_of_large_states_need_no_memory(untried: None) -> None:
    states = WholeStates("SOAP", pytorch_optimizer.SOAP, torch.float32)
    rows, columns = 8192, 28672
    factors = 2 * rows**2  # of rows, as 28,672 columns are more than SOAP preconditions
    assert states.nbytes((rows, columns)) == (4 * (2 * math.prod((rows, columns)) + factors), 0)
