"""Tests that every rank runs."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from tests.support.distributed import run_ranks

Test = Callable[..., None]


def on_ranks(
    world: int | dict[str, int], cases: Iterable[Any] | None = None, **limits: float
) -> Callable[[Test], Test]:
    """Makes a test of what each of `world` ranks does, of which a dictionary has the number by the test's `device`.

    `limits` are those of `run_ranks`. Fixtures and parameters travel to the ranks. With `cases` all of them run in one
    launch, each as first argument.

        @on_ranks(2, cases=(0, 3))
        def test_a_model_trains(stage: int, tmp_path: Path) -> None: ...
    """

    def decorate(function: Test) -> Test:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            count = world if isinstance(world, int) else world[given["device"]]
            run_ranks(count, _run, function.__module__, function.__name__, given, **limits)

        parameters = list(inspect.signature(function).parameters.values())
        signature = inspect.Signature(parameters if cases is None else parameters[1:])
        vars(test).update(cases=None if cases is None else list(cases), __signature__=signature)
        return test

    return decorate


def _run(module: str, name: str, given: dict[str, Any]) -> None:
    test: Any = getattr(importlib.import_module(module), name)
    if test.cases is None:
        test.__wrapped__(**given)
        return
    for case in test.cases:
        try:
            test.__wrapped__(case, **given)
        except BaseException as error:
            error.add_note(f"in the case {case!r}")
            raise
