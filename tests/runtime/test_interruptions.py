# mypy: disable-error-code="no-untyped-call"
"""After an exception at any line of `backward()` or `step()`, `zero_grad()` and a new pass train as plain torch does.

Or step() is refused, where the exception came amid the update.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerokit
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.interrupting import Interrupted, Interruption
from tests.support.on_ranks import on_ranks

STAGES = (0, 1, 2, 3)
EVERY = 11
"""Every eleventh line of a step is tried, and every 33rd of backward, from another one in each way to train."""


class Net(nn.Module):
    """Blocks between two layers of the rest; blocks are run again in backward if `again`."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def _data(number: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


class Training:
    """Steps of zerokit at a stage, or of plain torch on all ranks' data."""

    def __init__(
        self, stage: int | None, *, again: bool = False, passes: int = 1, adds: bool = False
    ) -> None:
        self.model, self.stage, self.passes, self.adds = Net(again), stage, passes, adds
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        where: Any = stage
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if stage is not None:
            self.optimizer = zerokit.ZeroOptimizer(
                self.model, torch.optim.AdamW, stage=where, precision="fp32", bucket_mb=1e-4, lr=0.05
            )

    def backward(self, number: int, armed: Any = None) -> None:
        """The backward passes of a step; `armed` is a context for the last one."""
        for part in range(self.passes):
            last = part == self.passes - 1
            if self.stage is None:
                for rank in range(self.world):
                    (self.model(_data(number + 50 * part, rank)) / self.world).backward()
                continue
            with self.optimizer.accumulate() if self.adds and not last else contextlib.nullcontext():
                loss = self.model(_data(number + 50 * part, self.rank))
                with armed if armed is not None and last else contextlib.nullcontext():
                    self.optimizer.backward(loss)

    def step(self) -> None:
        if self.stage is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        else:
            self.optimizer.clip_grad_norm_(0.1)
        self.optimizer.step()

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.backward(number)
            self.step()
            self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        with contextlib.nullcontext() if self.stage is None else self.optimizer.gathered():
            return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def _expected(*numbers: int, **ways: Any) -> Tensor:
    plain = Training(None, **ways)
    plain.train(*numbers)
    return plain.weights()


WAYS: list[dict[str, Any]] = [{}, {"passes": 2}, {"passes": 2, "adds": True}, {"again": True}]


def _interrupt(stage: int, at: int, during: str, begun: int, **ways: Any) -> tuple[Training, Interruption]:
    """A training that was interrupted in its second step, or its first one, and then cleared."""
    training, interruption = Training(stage, **ways), Interruption(at)
    training.train(*range(begun))
    if during == "backward":
        training.backward(5, interruption.armed())
    else:
        training.backward(5)
        with interruption.armed():
            training.step()
    training.optimizer.zero_grad()
    return training, interruption


@pytest.mark.full
@on_ranks(1, list(itertools.product(STAGES, enumerate(WAYS))))
def test_backward_may_be_interrupted_at_any_line(given: tuple[int, tuple[int, dict[str, Any]]]) -> None:
    stage, (turn, ways) = given
    begun = turn % 2 if not ways else 1  # also in the pass that records the order
    expected = _expected(*range(begun), 6, 7, **ways)
    tried = 0
    for at in itertools.count(1 + turn, EVERY * 3):
        training, interruption = _interrupt(stage, at, "backward", begun, **ways)
        if interruption.lines < at:
            break
        if interruption.where:
            training.train(6, 7)
            torch.testing.assert_close(
                training.weights(), expected, rtol=0, atol=2e-5, msg=interruption.where
            )
            tried += 1
    assert tried > 20


@on_ranks(1, STAGES)
def test_the_start_of_a_thread_may_be_interrupted(stage: int) -> None:
    training, expected = Training(stage), _expected(6, 7)
    with (
        mock.patch.object(threading.Thread, "start", side_effect=Interrupted),
        contextlib.suppress(Interrupted),
    ):
        training.backward(5)
    training.optimizer.zero_grad()
    training.train(6, 7)
    torch.testing.assert_close(training.weights(), expected, rtol=0, atol=2e-5)


@on_ranks(1, STAGES)
def test_step_may_be_interrupted_at_any_line(stage: int) -> None:
    """Without effect, with its whole effect, or all later steps and saves are refused."""
    without, whole = _expected(0, 6), _expected(0, 5, 6)
    outcomes = {"without": 0, "whole": 0, "refused": 0}
    for at in itertools.count(1, EVERY):
        training, interruption = _interrupt(stage, at, "step", 1)
        if interruption.lines < at:
            break
        try:
            training.train(6)
        except zerokit.UsageError as error:
            if "an exception ended the last update halfway" not in str(error):
                raise
            with pytest.raises(zerokit.UsageError, match="ended the last update halfway"):
                training.optimizer.state_dict()
            outcomes["refused"] += 1
            continue
        gaps = [(training.weights() - expected).abs().max().item() for expected in (without, whole)]
        assert min(gaps) < 2e-5, f"{interruption.where}: {gaps}"
        outcomes["without" if gaps[0] < gaps[1] else "whole"] += 1
    assert outcomes["without"] > 20
    assert outcomes["refused"] > 5


@on_ranks(2, STAGES)
def test_ranks_that_are_interrupted_alike_go_on(stage: int) -> None:
    expected = _expected(0, 6, 7)
    for at in (2, 20, 75, 130, 240, 333, 500):
        training, interruption = _interrupt(stage, at, "backward", 1)
        assert interruption.where
        training.train(6, 7)
        torch.testing.assert_close(training.weights(), expected, rtol=0, atol=2e-5, msg=interruption.where)


def _one_rank_is_interrupted(stage: int) -> None:
    """Rank 1 is interrupted when its first reduction is on its way, and goes on; rank 0 does not know."""
    training = Training(stage)
    training.train(0)
    if training.rank:
        training.model.first.weight.register_hook(_raise)
        with pytest.raises(Fault):
            training.backward(5)
        training.model.first.weight._backward_hooks.clear()  # type: ignore[union-attr]
        training.optimizer.zero_grad()
    training.train(6, 7)


@pytest.mark.full(default="3")
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_that_is_interrupted_alone_is_no_secret(stage: int) -> None:
    for outcome in run_ranks_expecting_errors(2, _one_rank_is_interrupted, stage, timeout=3.0):
        assert outcome.raised("ZerokitError"), outcome.describe()


class Fault(Exception):
    """A user's error."""


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Fault


def _raise(*_: Any) -> Any:
    raise Fault


def _undoing(handle: Any) -> Callable[[], None]:
    remove: Callable[[], None] = handle.remove
    return remove


def _by_tensor(training: Training) -> Callable[[], None]:
    return _undoing(training.model.get_parameter("blocks.0.0.weight").register_hook(_raise))


def _by_accumulation(training: Training) -> Callable[[], None]:
    return _undoing(
        training.model.get_parameter("blocks.1.0.weight").register_post_accumulate_grad_hook(_raise)
    )


def _by_module(training: Training) -> Callable[[], None]:
    return training.model.blocks[0].register_full_backward_hook(_raise).remove


def _by_recomputation(training: Training) -> Callable[[], None]:
    called = [0]

    def count(*_: Any) -> None:
        called[0] += 1
        if called[0] == 2:
            raise Fault

    return training.model.blocks[0].register_forward_pre_hook(count).remove


def _by_function(training: Training) -> Callable[[], None]:
    return training.model.blocks[1].register_forward_hook(lambda m, a, out: _Faulty.apply(out)).remove


def _by_pre_hook(training: Training) -> Callable[[], None]:
    return _undoing(training.optimizer.register_step_pre_hook(_raise))


FAULTS: dict[str, Callable[[Training], Callable[[], None]]] = {
    "a tensor's hook": _by_tensor,
    "a hook after accumulation": _by_accumulation,
    "a module's backward hook": _by_module,
    "the second forward of a checkpoint": _by_recomputation,
    "a custom function's backward": _by_function,
    "a hook before the step": _by_pre_hook,
}


@on_ranks(2, list(itertools.product(STAGES, FAULTS, (1, 2))))
def test_a_users_error_on_all_ranks_leaves_nothing_behind(given: tuple[int, str, int]) -> None:
    stage, fault, passes = given
    ways: dict[str, Any] = {"again": fault == "the second forward of a checkpoint", "passes": passes}
    training = Training(stage, **ways)
    training.train(0)
    if passes == 2:
        training.backward(4)  # whole passes before the one that fails are dropped, too
    undo = FAULTS[fault](training)
    with contextlib.suppress(Fault):
        training.backward(5)
        training.step()
        pytest.fail("no error came")
    undo()
    training.optimizer.zero_grad()
    training.train(6, 7)
    torch.testing.assert_close(training.weights(), _expected(0, 6, 7, **ways), rtol=0, atol=2e-5)


class _HalfSGD(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if type(self).fails:
            first = self.param_groups[0]["params"][0]
            with torch.no_grad():
                first.sub_(first.grad)
            raise Fault
        return super().step(closure)


def test_a_load_makes_up_for_a_step_that_failed_halfway(tmp_path: Any) -> None:
    assert run_ranks(1, _load_after_half_a_step, str(tmp_path))


def _load_after_half_a_step(directory: str) -> bool:
    for stage in STAGES:
        _fail_and_load(stage, directory)
    return True


def _fail_and_load(stage: Any, directory: str) -> None:
    model = Net()
    optimizer = zerokit.ZeroOptimizer(model, _HalfSGD, stage=stage, precision="bf16", lr=0.1)

    def step() -> None:
        optimizer.backward(model(_data(1, 0)))
        optimizer.step()
        optimizer.zero_grad()

    step()
    path = zerokit.save(f"{directory}/{stage}", optimizer, step=1)
    own = optimizer.state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for load in (lambda: zerokit.load(path, optimizer), lambda: optimizer.load_state_dict(own)):
        _HalfSGD.fails = True
        with pytest.raises(Fault):
            step()
        _HalfSGD.fails = False
        optimizer.zero_grad()
        with pytest.raises(zerokit.UsageError, match="ended the last update halfway"):
            step()
        with pytest.raises(zerokit.CheckpointError, match="ended the last update halfway"):
            zerokit.save(f"{directory}/{stage}", optimizer, step=2)
        zerokit.load(path, optimizer, weights_only=True)
        with pytest.raises(zerokit.UsageError, match="ended the last update halfway"):
            step()
        optimizer.zero_grad()
        load()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        step()
        load()
