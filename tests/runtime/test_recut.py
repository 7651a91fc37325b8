"""Shares that change between steps: the same bits, traffic and memory as predicted, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import random
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES, Batch, Case
from tests.support.on_ranks import on_ranks
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    draw,
    one_step,
    trained,
    whole_weights,
    wrap,
)
from zerokit.errors import StorageError, UsageError
from zerokit.layout import Layout
from zerokit.runtime import memory_watch, recut
from zerokit.runtime import shares as shares_of_ranks
from zerokit.runtime.collectives.host.node import SWITCH
from zerokit.runtime.homes.disk import File


def draw_batch(case: Case, run: Run, step: int) -> Batch:
    """This rank's batch of a step."""
    return draw(case, run, step, 0, dist.get_rank())


def _shares(choice: random.Random, world: int) -> tuple[int, ...] | None:
    """Shares of all ranks, some of them 0; None for equal ones."""
    chosen = tuple(choice.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(world))
    return chosen if any(chosen) else None


def _train(
    name: str, run: Run, recuts: int, options: dict[str, Any], average: bool = False
) -> tuple[list[str], str]:
    """Train, with so many recuts before each step; what came out, and the average."""
    case = CASES[name]
    model = build_seeded(case, dist.get_rank())
    optimizer = wrap(model, case, run, **options)
    ema = zerokit.Ema(optimizer, decay=0.5) if average else None
    choice, trajectory = random.Random(5), Trajectory()
    for step in range(run.steps):
        for _ in range(recuts):
            optimizer.recut(_shares(choice, dist.get_world_size()))
            if step > 1:
                held, predicted = optimizer.memory(), optimizer.predicted_memory()
                assert held.optimizer == predicted.optimizer
                assert (held.parameters, held.frozen) == (predicted.parameters, predicted.frozen)
        one_step(model, optimizer, case, run, step, trajectory)
        if ema is not None:
            ema.update()
    trajectory.weights = digest(whole_weights(model).items())
    averaged = ""
    if ema is not None:
        with ema.applied():
            averaged = digest(whole_weights(model).items())
    return trajectory.bits(), averaged


def _both(name: str, run: Run, recuts: int, switch: str, average: bool, options: dict[str, Any]) -> None:
    os.environ[SWITCH] = switch
    recut = _train(name, run, recuts, options, average)
    assert recut == _train(name, run, 0, options, average)


ADAMW = Run(clip=0.5, steps=10)


@pytest.mark.full(default=["gpt-2-*-1", "gpt-3-run4-0", "tied_blocks-*-1"])
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("name", "world", "run"),
    [
        ("gpt", 1, ADAMW),
        ("gpt", 2, replace(ADAMW, stage=0)),
        ("gpt", 3, replace(ADAMW, stage=1, micro=2, accumulate=True)),
        ("gpt", 3, replace(ADAMW, stage=2, precision="bf16")),
        ("gpt", 3, replace(ADAMW, stage=3)),
        ("gpt", 4, replace(ADAMW, stage=(1, 3), mesh=(2, 2), precision="bf16")),
        ("gpt", 4, replace(ADAMW, stage=(0, 3), mesh=(2, 2))),
        ("lora", 3, replace(ADAMW, stage=3, precision="bf16")),
        ("tied_blocks", 2, replace(ADAMW, stage=3, precision="fp16")),
        ("tiny_parameters", 3, replace(ADAMW, stage=2, optimizer="sgd")),
    ],
)
def test_fifty_recuts_change_no_bit(name: str, world: int, run: Run, switch: str) -> None:
    """At random shares, five before each of ten steps, with an average of the weights."""
    run_ranks(world, _both, name, replace(run, bucket_mb=SMALL), 5, switch, True, {})


@pytest.mark.full(default=["3-run0-device-1", "2-run4-disk-1", "3-run6-fp8-0"])
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("world", "run", "states"),
    [
        (3, Run(optimizer="muon", stage=2), "device"),
        (2, Run(optimizer="muon", stage=0), "device"),
        (4, Run(optimizer="muon", stage=(1, 3), mesh=(2, 2), precision="bf16"), "fp8"),
        (3, Run(optimizer="adafactor", stage=3, precision="bf16"), "device"),
        (2, Run(optimizer="soap", stage=3), "disk"),
        (3, Run(optimizer="soap", stage=1), "device"),
        (3, Run(optimizer="adam", stage=3), "fp8"),
        (3, Run(optimizer="adamw", stage=2, precision="bf16"), "disk"),
        (4, Run(optimizer="adamw", stage=(0, 2), mesh=(2, 2), precision="bf16"), "disk"),
        (3, Run(optimizer="nadam", stage=3), "device"),
    ],
)
def test_whole_tensors_and_states_elsewhere_move_as_they_are(
    world: int, run: Run, states: str, switch: str, tmp_path: Path
) -> None:
    options = {"states": str(tmp_path) if states == "disk" else states}
    run_ranks(world, _both, "gpt", replace(run, steps=5, bucket_mb=SMALL), 3, switch, True, options)


# ---- what moves, and what is held


def _changing_hands(layout: Layout, shares: tuple[int, ...]) -> int:
    """Elements that another rank updates with these shares, counted one by one."""
    moved = 0
    for before, after in zip(layout.units, layout.for_world(layout.world, shares).units, strict=True):
        for part in before.slices:
            elements = torch.arange(part.memory.start, part.memory.stop)
            bounds = [torch.tensor(unit.cut.bounds[1:]) for unit in (before, after)]
            owners = [torch.bucketize(elements, ends, right=True) for ends in bounds]
            moved += int((owners[0] != owners[1]).sum())
    return moved


@on_ranks(3, cases=((2, "fp32", 12), (1, "bf16", 12), (3, "bf16", 14), (3, "fp32", 12), (0, "fp32", 0)))
def test_what_moves_is_what_changes_hands(case: tuple[int, Any, int]) -> None:
    """Times the bytes of masters, moments and, at stage 3, parameters in bf16; in fp32 these are the masters.

    At stages 0 to 2 in fp32 the masters are the parameters, which every rank has.
    """
    stage, precision, nbytes = case
    if (stage, precision) == (2, "fp32"):
        nbytes = 8
    _, model, optimizer = trained("gpt", Run(stage=stage, precision=precision, bucket_mb=SMALL), 2)
    for shares in [(3, 1, 0), (1, 2, 5), (0, 0, 1), (1, 1, 1)]:
        expected = _changing_hands(optimizer.layout, shares) * nbytes
        report = optimizer.recut(shares)
        assert report.bytes == expected
        assert set(report.by_operation) <= {"recut"}
        assert not optimizer.recut(shares).bytes
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2, cases=(2, 3))
def test_memory_is_as_predicted_and_does_not_grow(stage: int, tmp_path: Path) -> None:
    """Fifty recuts: bytes held as the shares have them, the process no larger, the file of states neither."""
    run = Run(stage=stage, precision="bf16", bucket_mb=SMALL)
    for states in ("device", str(tmp_path)):
        case, model, optimizer = trained("gpt", run, 1, states=states)
        choice, sizes, files = random.Random(3), list[int](), list[int]()
        for step in range(50):
            optimizer.recut(_shares(choice, 2))
            one_step(model, optimizer, case, run, step, Trajectory())
            optimizer.backward(case.loss(model, draw_batch(case, run, step)))
            assert optimizer.memory() == optimizer.predicted_memory()
            optimizer.zero_grad()
            optimizer.recut((1, 1))
            sizes.append(psutil.Process().memory_info().rss)
            files.append(getattr(optimizer.runtime.home, "_end", 0))
        assert max(sizes[25:]) <= max(sizes[:25]) + (8 << 20)
        assert max(files[25:]) <= 1.5 * max(files[:25])


# ---- what stays


@on_ranks(2, cases=(1, 3))
def test_groups_hooks_and_schedulers_go_on(stage: int) -> None:
    case, model, optimizer = trained("gpt", Run(stage=stage), 1)
    groups, calls = optimizer.param_groups, list[int]()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    held = list(model.parameters())
    rate = groups[0]["lr"]
    optimizer.recut((3, 1))
    assert optimizer.param_groups is groups
    assert all(own is other for own, other in zip(model.parameters(), held, strict=True))
    assert {id(p) for group in groups for p in group["params"]} == {
        id(master.tensor) for _, master, _ in optimizer.runtime.masters()
    }
    one_step(model, optimizer, case, Run(stage=stage), 1, Trajectory())
    scheduler.step()
    assert groups[0]["lr"] == rate / 2
    assert calls == [1]


@on_ranks(3, cases=(0, 1, 2, 3))
def test_gradients_that_are_held_move(stage: int) -> None:
    """Between two micro-batches, and between step() and a backward without zero_grad()."""
    results = []
    for shares, others in (((1, 1, 1), (1, 1, 1)), ((4, 0, 1), (1, 2, 3))):
        run = Run(stage=stage, bucket_mb=SMALL)
        case, model, optimizer = trained("gpt", run, 1)
        for step in range(3):
            optimizer.backward(case.loss(model, draw_batch(case, run, step)))
            optimizer.recut(shares)
            case.loss(model, draw_batch(case, run, step + 10)).backward()
            norm = optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.recut(others)
        results.append((norm.item(), digest(whole_weights(model).items())))
    assert results[0] == results[1]


@on_ranks(3, cases=(1, 3))
def test_parameters_frozen_later_keep_their_own_states(stage: int) -> None:
    """The frozen ones count fewer steps, wherever their elements go."""
    results = []
    for shares in ((1, 1, 1), (4, 0, 1)):
        run = Run(stage=stage, precision="bf16")
        case, model, optimizer = trained("gpt", run, 2)
        named = list(model.named_parameters())
        for number, (_, parameter) in enumerate(named):
            parameter.requires_grad_(number % 3 > 0)
        for step in range(2):
            optimizer.recut(shares)
            one_step(model, optimizer, case, run, step, Trajectory())
        for _, parameter in named:
            parameter.requires_grad_(True)
        for step in range(2):
            optimizer.recut((1, 1, 1) if step else shares)
            one_step(model, optimizer, case, run, step, Trajectory())
        results.append(digest(whole_weights(model).items()))
    assert results[0] == results[1]


@on_ranks(2, cases=(1, 3))
def test_saves_loads_and_release_after_it(stage: int, tmp_path: Path) -> None:
    run = Run(stage=stage, precision="bf16")
    case, model, optimizer = trained("gpt", run, 2)
    optimizer.recut((3, 1))
    before = digest(whole_weights(model).items())
    zerokit.save(tmp_path / str(stage), optimizer, step=2)
    own = copy.deepcopy(optimizer.state_dict())
    one_step(model, optimizer, case, run, 2, Trajectory())
    after = digest(whole_weights(model).items())
    optimizer.load_state_dict(own)
    assert digest(whole_weights(model).items()) == before
    optimizer.recut((0, 1))
    zerokit.load(tmp_path / str(stage), optimizer)
    one_step(model, optimizer, case, run, 2, Trajectory())
    assert digest(whole_weights(model).items()) == after
    with pytest.raises(zerokit.errors.LayoutMismatch):
        optimizer.load_state_dict(own)
    zerokit.release(model)
    with pytest.raises(UsageError, match="released"):
        optimizer.recut((1, 1))


@on_ranks(3, cases=(1, 2, 3))
def test_one_rank_has_everything(stage: int) -> None:
    """Gradients are shown, and a rank's part of the state is loaded, as with equal shares."""
    results = []
    for shares in ((1, 1, 1), (0, 1, 0)):
        run = Run(stage=stage, bucket_mb=SMALL)
        case, model, optimizer = trained("gpt", run, 1)
        optimizer.recut(shares)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.backward(case.loss(model, draw_batch(case, run, 1)))
        with optimizer.gathered_gradients():
            shown = digest((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        optimizer.step()
        results.append((shown, digest(whole_weights(model).items())))
    assert results[0] == results[1]


# ---- what is refused, and what fails


@on_ranks(2, cases=(1, 3))
def test_it_is_refused_inside_a_pass_and_with_whole_values(stage: int) -> None:
    run = Run(stage=stage)
    case, model, optimizer = trained("gpt", run, 1)
    bits = digest(whole_weights(model).items())

    def refused(match: str) -> None:
        with pytest.raises(UsageError, match=match):
            optimizer.recut((3, 1))

    loss = case.loss(model, draw_batch(case, run, 1))
    refused("a forward pass waits for its backward")
    handle = loss.register_hook(lambda gradient: refused("a pass is under way"))
    loss.backward()
    handle.remove()
    with optimizer.gathered_gradients():
        refused("inside gathered_gradients")
    optimizer.zero_grad()
    with optimizer.accumulate():
        refused("alone")
        case.loss(model, draw_batch(case, run, 1)).backward()
    refused("alone")
    case.loss(model, draw_batch(case, run, 1)).backward()
    optimizer.zero_grad()
    with optimizer.gathered():
        refused("whole weights are shown")
    for _ in optimizer.weights():
        refused("the loop over weights")
    wrong: list[tuple[Any, str]] = [
        ((1,), "1 shares"),
        ((0, 0), "not all of them 0"),
        ("much", "expected one integer"),
    ]
    for shares, match in wrong:
        with pytest.raises(UsageError, match=match):
            optimizer.recut(shares)
    with pytest.raises(UsageError, match=r"\[3, 1\] on rank 0, \[1, 3\] on rank 1"):
        optimizer.recut((3, 1) if dist.get_rank() == 0 else (1, 3))
    assert optimizer.layout.shares == ()
    assert digest(whole_weights(model).items()) == bits
    one_step(model, optimizer, case, run, 1, Trajectory())


def _fail_at(calls: int, error: BaseException) -> Any:
    """A function's stand-in that raises at one call, and does what it did else."""
    count = itertools.count(1)

    def wrap(function: Any) -> Any:
        def failing(*arguments: Any, **options: Any) -> Any:
            if next(count) == calls:
                raise error
            return function(*arguments, **options)

        return failing

    return wrap


@on_ranks(2, cases=((2, 1), (3, 2), (3, 5)))
def test_one_rank_without_memory_leaves_all_as_they_were(case: tuple[int, int]) -> None:
    """Also where some units have moved already: they come back, and training goes on."""
    stage, unit = case
    run = Run(stage=stage, precision="bf16", bucket_mb=SMALL)
    model_case, model, optimizer = trained("gpt", run, 2)
    bits = digest(whole_weights(model).items())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            no_memory = _fail_at(unit, torch.OutOfMemoryError("no memory"))
            patch.setattr(recut._Moving, "_allocated", no_memory(recut._Moving._allocated))
        with pytest.raises(StorageError, match="rank 1: OutOfMemoryError: no memory"):
            optimizer.recut((3, 1))
    assert optimizer.layout.shares == ()
    assert digest(whole_weights(model).items()) == bits
    one_step(model, optimizer, model_case, run, 2, Trajectory())
    optimizer.recut((3, 1))
    assert optimizer.memory().optimizer == optimizer.predicted_memory().optimizer


def _free_heap() -> list[torch.Tensor]:
    """Memory that earlier tests of this process have given back, and the C library still has: it needs no new space."""
    process, held, grown = psutil.Process(), list[torch.Tensor](), 0
    while grown < 8:
        before = process.memory_info().vms
        held.append(torch.empty(1 << 18, dtype=torch.uint8))
        grown = grown + 1 if process.memory_info().vms > before else 0
    return held


@on_ranks(2, cases=(1, 2, 3))
def test_one_rank_that_runs_out_of_address_space_leaves_all_as_they_were(stage: Any) -> None:
    """The system itself refuses memory, wherever that is asked for."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, precision="bf16", bucket_mb=SMALL, lr=1e-3, shares=(1, 3)
    )
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 1000)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    bits = digest(whole_weights(model).items())
    _, most = before = resource.getrlimit(resource.RLIMIT_AS)
    held = _free_heap() if dist.get_rank() == 0 else []
    for room in (2, 8):  # of 18 MiB that all units take
        if dist.get_rank() == 0:
            size = psutil.Process().memory_info().vms + (room << 20)
            resource.setrlimit(resource.RLIMIT_AS, (size, most))
        try:
            with pytest.raises(StorageError, match="rank 0: "):
                optimizer.recut((3, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert optimizer.layout.shares == (1, 3)
        assert digest(whole_weights(model).items()) == bits
    held.clear()
    optimizer.recut((3, 1))
    assert digest(whole_weights(model).items()) == bits


@on_ranks(2, cases=((1, "_allocated"), (3, "_become"), (3, "_exchange")))
def test_after_an_interruption_nothing_goes_on(case: tuple[int, str], tmp_path: Path) -> None:
    """All ranks are interrupted amid their units: no load could tell which of them have moved."""
    stage, where = case
    run, path = Run(stage=stage, precision="bf16", bucket_mb=SMALL), tmp_path / f"{stage} {where}"
    model_case, model, optimizer = trained("gpt", run, 2)
    zerokit.save(path, optimizer, step=2)
    own = copy.deepcopy(optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        interrupted = _fail_at(3, KeyboardInterrupt())
        patch.setattr(recut._Moving, where, interrupted(getattr(recut._Moving, where)))
        with pytest.raises(KeyboardInterrupt):
            optimizer.recut((3, 1))
    asks = (
        lambda: one_step(model, optimizer, model_case, run, 2, Trajectory()),
        lambda: optimizer.recut((1, 1)),
        lambda: zerokit.load(path, optimizer),
        lambda: zerokit.load(path, optimizer, weights_only=True),
        lambda: optimizer.load_state_dict(own),
    )
    for ask in asks:
        with pytest.raises(
            UsageError, match=r"ended recut\(\) halfway.*build the model and the optimizer anew"
        ):
            ask()
    with pytest.raises(zerokit.errors.CheckpointError, match="halfway"):
        zerokit.save(tmp_path / f"later {stage} {where}", optimizer, step=3)


@on_ranks(2, cases=("written", "read"))
def test_a_disk_that_fails_on_one_rank(what: str, tmp_path: Path) -> None:
    """Everything comes back, or else steps are refused on all ranks until a load."""
    run = Run(stage=2, precision="bf16", bucket_mb=SMALL)
    case, model, optimizer = trained("gpt", run, 2, states=str(tmp_path))
    zerokit.save(tmp_path / what, optimizer, step=2)
    one_step(model, optimizer, case, run, 2, Trajectory())
    expected = digest(whole_weights(model).items())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            name = "write" if what == "written" else "read"
            failing = _fail_at(3, StorageError("the disk is broken"))(getattr(File, name))
            patch.setattr(File, name, failing)
        with pytest.raises(StorageError, match="rank 1: StorageError: the disk is broken"):
            optimizer.recut((3, 1))
    assert optimizer.layout.shares == ()
    if optimizer.refusal:
        with pytest.raises(UsageError, match="load a checkpoint"):
            optimizer.recut((3, 1))
    zerokit.load(tmp_path / what, optimizer)
    optimizer.recut((1, 3))
    one_step(model, optimizer, case, run, 2, Trajectory())
    assert digest(whole_weights(model).items()) == expected


def _killed(directory: Path) -> None:
    """Rank 1 is killed while units move; those that resume go on from the save."""
    run = Run(stage=3, precision="bf16", bucket_mb=SMALL)
    _, _model, optimizer = trained("gpt", run, 2)
    zerokit.save(directory, optimizer, step=2)
    if dist.get_rank() == 1:
        moves = itertools.count()
        plain = recut._Moving._exchange

        def dying(self: Any, lines: Any) -> None:
            if next(moves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(self, lines)

        recut._Moving._exchange = dying  # type: ignore[method-assign]
    optimizer.recut((3, 1))


def _resumed(directory: Path) -> str:
    run = Run(stage=3, precision="bf16", bucket_mb=SMALL)
    case, model, optimizer = trained("gpt", run, 0, shares=(1, 3))
    if directory.exists():
        zerokit.load(directory, optimizer)
    for step in range(2 if directory.exists() else 0, 3):
        one_step(model, optimizer, case, run, step, Trajectory())
    return digest(whole_weights(model).items())


def test_a_kill_in_the_midst_resumes_from_the_last_save(tmp_path: Path) -> None:
    outcomes = run_ranks_expecting_errors(2, _killed, tmp_path / "run")
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert not outcomes[0].ok
    assert run_ranks(2, _resumed, tmp_path / "run") == run_ranks(2, _resumed, tmp_path / "none")


# ---- by memory


def _follow_memory() -> tuple[list[tuple[int, ...]], str]:
    run, rank = Run(stage=3, bucket_mb=SMALL), dist.get_rank()
    size = 1 << 20
    free, said = {0: size, 1: size}, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for module in (memory_watch, shares_of_ranks):
            patch.setattr(module, "free_bytes", lambda device, sharing: free[rank])
        patch.setattr(memory_watch, "EVERY", 2)
        patch.setattr(shares_of_ranks, "_GRAIN", 1 << 10)
        case, model, optimizer = trained("gpt", run, 2, shares="memory")
        found = [optimizer.layout.shares]
        for step in range(2, 8):
            # One rank's runs out; then that of both, and nothing would be won.
            free[1], free[0] = size // 100, size if step < 4 else size // 100
            one_step(model, optimizer, case, run, step, Trajectory())
            found.append(optimizer.layout.shares)
    return found, said.getvalue()


@on_ranks(2)
def test_a_look_that_fails_on_one_rank_changes_nothing() -> None:
    broken = False

    def free(device: torch.device, sharing: object) -> int:
        if broken and dist.get_rank() == 1:
            raise RuntimeError("the driver does not answer")
        return 1 << 30

    with pytest.MonkeyPatch.context() as patch:
        for module in (memory_watch, shares_of_ranks):
            patch.setattr(module, "free_bytes", free)
        patch.setattr(memory_watch, "EVERY", 1)
        case, model, optimizer = trained("gpt", Run(stage=3, bucket_mb=SMALL), 1, shares="memory")
        broken = True
        one_step(model, optimizer, case, Run(stage=3, bucket_mb=SMALL), 1, Trajectory())
    assert optimizer.layout.shares == ()


def test_shares_follow_free_memory() -> None:
    (found, said), (other, nothing) = run_ranks(2, _follow_memory)
    assert found == other
    assert found[:2] == [(), ()]  # the first step does not look
    assert found[2][0] > 1.2 * found[2][1] > 0
    assert set(found[2:]) == {found[2]}
    assert said.count("recut") == 1
    assert re.search(r"rank 1 has 0.00 GB free.*with shares \d+, \d+ by free memory: recut", said)
    assert not nothing
