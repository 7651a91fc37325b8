"""Forward passes: which of them backward belongs to, and which units it is done with."""

from __future__ import annotations

from zerokit.runtime.order import BackwardPlan
from zerokit.runtime.passes import ForwardPass, Passes

PLAN = BackwardPlan((), ())


def passed(*uses: int) -> ForwardPass:
    current = ForwardPass()
    for unit in uses:
        current.use(unit)
    return current


def test_before_any_pass() -> None:
    passes = Passes()
    assert passes.latest() is None
    assert not passes.unanswered
    assert not passes.current.used(0)


def test_a_pass_with_gradients_waits_for_a_backward() -> None:
    passes = Passes()
    answers = []
    for training in (False, True):
        passes.begin(training=training)
        answers.append((passes.latest() is passes.current, passes.unanswered))
    passes.current.consumed = True
    passes.end_backward()
    answers.append((passes.latest() is None, passes.unanswered))
    assert answers == [(False, False), (True, True), (True, False)]


def test_each_forward_is_a_pass_of_its_own() -> None:
    passes = Passes()
    passes.begin(training=True)
    first = passes.current
    first.use(1)
    passes.begin(training=True)
    assert passes.current is not first
    assert not passes.current.used(1)
    passes.current.consumed = True
    passes.end_backward()
    assert passes.latest() is first


def test_only_passes_of_the_whole_model_follow_an_order() -> None:
    passes = Passes()
    passes.begin(training=True)
    planned = passes.current
    planned.plan = PLAN
    passes.begin(training=True)
    assert passes.latest() is passes.current
    assert passes.latest(planned=True) is planned
    planned.consumed = True
    passes.end_backward()
    assert passes.latest(planned=True) is None


def test_units_used_elsewhere_are_forgotten_with_the_last_pass() -> None:
    passes = Passes()
    passes.begin(training=True)
    first = passes.current
    passes.begin(training=True)
    passes.elsewhere.add(3)
    passes.current.consumed = True
    passes.end_backward()
    assert passes.elsewhere == {3}
    first.consumed = True
    passes.end_backward()
    assert passes.elsewhere == set()


def test_clearing_expects_no_backward() -> None:
    passes = Passes()
    passes.begin(training=True)
    passes.elsewhere.add(3)
    passes.clear()
    assert passes.latest() is None
    assert passes.elsewhere == set()


def test_when_a_unit_is_over() -> None:
    passes = Passes()
    passes.begin(training=True)
    current = passes.current
    for unit in (0, 1, 2):
        current.use(unit)
    over = passes.when_over(current, 2, accumulates=True)  # behind the second use
    assert [over(unit) for unit in (0, 1, 2, 3)] == [False, False, True, True]
    passes.elsewhere.add(2)
    assert not over(2)  # nothing tells when its last gradient has come
    assert not any(map(passes.when_over(current, 2, accumulates=False), range(4)))


def test_nothing_is_over_while_another_pass_may_bring_gradients() -> None:
    passes = Passes()
    passes.begin(training=True)
    first = passes.current
    passes.begin(training=True)
    current = passes.current
    current.use(0)
    current.use(1)
    assert not passes.when_over(current, 1, accumulates=True)(1)
    first.consumed = True
    assert passes.when_over(current, 1, accumulates=True)(1)
