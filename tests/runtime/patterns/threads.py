"""Threads beside the training loop, and parts of it inside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import Subject
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)


@pattern("backward in a thread of its own", Mlp)
def backward(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            loss = square(engine.model(engine.data(4, 8)))
            engine.record(loss)
            pool.submit(engine.backward, loss).result()
            engine.step()
            engine.zero_grad()


@pattern("forward in a thread, all else in the main one", Mlp)
def forward(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            engine.update(square(pool.submit(engine.model, engine.data(4, 8)).result()))


@pattern("the whole loop in a thread", Mlp)
def loop(engine: Engine) -> None:
    def steps() -> None:
        for _ in range(STEPS):
            engine.update(square(engine.model(engine.data(4, 8))))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(steps).result()


@pattern("`step()` in a thread", Mlp)
def step(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            loss = square(engine.model(engine.data(4, 8)))
            engine.record(loss)
            engine.backward(loss)
            pool.submit(engine.step).result()
            engine.zero_grad()


@pattern("`state_dict()` in a thread", Mlp)
def state(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(STEPS):
            engine.update(square(engine.model(engine.data(4, 8))))
            weights = pool.submit(engine.model.state_dict).result()
            engine.record(torch.stack([value.abs().sum() for value in weights.values()]).sum())
