"""Threads beside the training loop, and parts of it inside them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Subject
from tests.runtime.patterns.models import square

pattern = Subject(__name__)


def _apart(step: Callable[[Engine, Any], None]) -> Callable[[Engine], None]:
    """Steps with a thread that works off what it is given."""

    def train(engine: Engine) -> None:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(STEPS):
                step(engine, lambda *call: pool.submit(*call).result())

    return train


def _step(engine: Engine, elsewhere: Any) -> None:
    engine.backward(engine.loss())
    elsewhere(engine.step)
    engine.zero_grad()


def _backward(engine: Engine, elsewhere: Any) -> None:
    elsewhere(engine.backward, engine.loss())
    engine.finish()


def _state(engine: Engine, elsewhere: Any) -> None:
    engine.train()
    weights = elsewhere(engine.model.state_dict)
    engine.record(torch.stack([value.abs().sum() for value in weights.values()]).sum())


pattern("backward in a thread of its own")(_apart(_backward), "backward")
pattern("forward in a thread, all else in the main one")(
    _apart(lambda engine, elsewhere: engine.update(square(elsewhere(engine.model, engine.data())))), "forward"
)
pattern("`step()` in a thread")(_apart(_step), "step")
pattern("`state_dict()` in a thread")(_apart(_state), "state")


@pattern("the whole loop in a thread")
def loop(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(USUAL, engine).result()
