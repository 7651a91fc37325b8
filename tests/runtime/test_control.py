"""What ranks compare before a step: when the answers are looked at, and what each answer leads to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import zerokit
from tests.support.recording import RecordingRoute
from tests.support.reductions import bring, gradients_of
from zerokit.runtime.collectives import PendingNumbers
from zerokit.runtime.control import StepControl
from zerokit.runtime.gradients import Gradients

BOTH = pytest.mark.parametrize("runs_ahead", [False, True])


class Answer:
    """A reading that is noted down when somebody looks at it."""

    def __init__(self, numbers: list[float], look: Callable[[], None]) -> None:
        self._numbers, self._look = numbers, look

    def get(self) -> list[float]:
        self._look()
        return self._numbers

    def arrived(self) -> bool:
        return True


class AnsweringRoute(RecordingRoute):
    """The other rank says what the test says: another path, gradients, an overflow, other frozen parameters."""

    def __init__(self, *, runs_ahead: bool) -> None:
        super().__init__(runs_ahead=runs_ahead)
        self.asked = 0
        self.looked: list[int] = []
        self.other_path = self.other_received = self.other_overflow = False
        self.other_frozen: list[str] | None = None

    def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> PendingNumbers:
        number, self.asked = self.asked, self.asked + 1
        path, negative, received = values
        overflow = 0.0 if flag is None else float(flag)
        if self.other_path:
            path += 1.0
        answer = [path, negative, max(received, self.other_received), max(overflow, self.other_overflow)]
        return Answer(answer, lambda: self.looked.append(number))

    def all_gather_objects(self, value: object) -> list[object]:
        return [value, value if self.other_frozen is None else self.other_frozen]


def make(*, runs_ahead: bool) -> tuple[AnsweringRoute, Gradients, StepControl]:
    route = AnsweringRoute(runs_ahead=runs_ahead)
    gradients = gradients_of(route, 2, [[(4,), (4,)]])
    storages = [unit.storage for unit in gradients.units.values()]
    return route, gradients, StepControl(route, storages, gradients)


def backward(gradients: Gradients) -> None:
    bring(gradients, 0, 0)
    bring(gradients, 0, 1)
    gradients.end_backward()


def test_a_host_looks_at_once() -> None:
    route, gradients, control = make(runs_ahead=False)
    backward(gradients)
    for step in range(3):
        assert control.agree(None)
        assert route.looked == list(range(step + 1))


def test_a_device_is_looked_at_a_step_later() -> None:
    route, gradients, control = make(runs_ahead=True)
    backward(gradients)
    for step in range(3):
        assert control.agree(None)
        assert route.asked == step + 1
        assert route.looked == list(range(step))
    control.finish()
    assert route.looked == [0, 1, 2]
    control.finish()
    assert route.looked == [0, 1, 2]


@BOTH
def test_in_fp16_everybody_looks_at_once(runs_ahead: bool) -> None:
    route, gradients, control = make(runs_ahead=runs_ahead)
    backward(gradients)
    assert control.agree(torch.tensor(True))
    assert route.looked == [0]
    assert not control.agree(torch.tensor(False))
    route.other_overflow = True
    assert not control.agree(torch.tensor(True))
    assert route.looked == [0, 1, 2]
    control.finish()
    assert route.looked == [0, 1, 2]


@BOTH
def test_other_paths_are_an_error_on_the_step_that_looks(runs_ahead: bool) -> None:
    route, gradients, control = make(runs_ahead=runs_ahead)
    backward(gradients)
    assert control.agree(None)
    route.other_path = True
    if runs_ahead:
        assert control.agree(None)
        route.other_path = False
    with pytest.raises(zerokit.LayoutMismatch, match="different sequences of collectives"):
        control.agree(None)
    route.other_path = False
    if not runs_ahead:
        assert control.agree(None)
    assert gradients.received  # nothing was dropped


def test_the_last_steps_are_looked_at_in_the_end() -> None:
    route, gradients, control = make(runs_ahead=True)
    backward(gradients)
    route.other_path = True
    assert control.agree(None)
    with pytest.raises(zerokit.LayoutMismatch, match="different sequences"):
        control.finish()
    control.finish()
    assert route.looked == [0]


@BOTH
def test_frozen_parameters_that_differ_are_named(runs_ahead: bool) -> None:
    route, gradients, control = make(runs_ahead=runs_ahead)
    storage = gradients.units[0].storage
    storage.stopped = {1}
    bring(gradients, 0, 0)
    gradients.end_backward()
    route.other_path, route.other_frozen = True, []
    if runs_ahead:
        assert control.agree(None)
    with pytest.raises(zerokit.LayoutMismatch, match=r"rank 0 \['unit0\.1'\], rank 1 \[\].*requires_grad_"):
        control.agree(None)


def test_the_path_tells_of_collectives_and_of_frozen_parameters() -> None:
    _, gradients, _ = make(runs_ahead=False)
    paths = []

    class Listening(AnsweringRoute):
        def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> PendingNumbers:
            paths.append(values[0])
            assert values[1] == -values[0]
            return super().agree_soon(values, flag)

    route = Listening(runs_ahead=False)
    gradients = gradients_of(route, 2, [[(4,), (4,)]])
    storage = gradients.units[0].storage
    control = StepControl(route, [storage], gradients)
    backward(gradients)
    control.agree(None)
    control.agree(None)
    assert paths[0] == paths[1]
    gradients.forget()
    storage.stopped = {1}
    bring(gradients, 0, 0)
    control.agree(None)
    gradients.end_backward()
    control.agree(None)
    assert len(set(paths)) == 3


@BOTH
def test_without_any_gradient_nothing_is_left_behind(runs_ahead: bool) -> None:
    """A refused step drops nothing but what an unanswered pass left, and is looked at at once."""
    route, gradients, control = make(runs_ahead=runs_ahead)
    with pytest.raises(zerokit.UsageError, match="before any backward"):
        control.agree(None)
    assert route.looked == [0]
    assert not gradients.summed
    control.finish()
    assert route.looked == [0]
    backward(gradients)
    assert control.agree(None)


@BOTH
def test_a_rank_without_gradients_steps_where_another_has_some(runs_ahead: bool) -> None:
    route, _, control = make(runs_ahead=runs_ahead)
    route.other_received = True
    assert control.agree(None)
    assert route.looked == [0]
    route.other_received = False
    with pytest.raises(zerokit.UsageError, match="before any backward"):
        control.agree(None)
