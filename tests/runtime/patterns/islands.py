"""Islands that average their weights once in some steps (`LocalSteps`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import Subject, updates
from tests.runtime.patterns.models import Words, square
from tests.runtime.patterns.ranks import Skips

pattern = Subject(__name__)

STEPS = 5
"""Two rounds of two steps, and one step of the third."""
EVERY = {"every": 2}
CLIPPED = updates(Engine.loss, 0.1, STEPS)
pattern("local steps, with clipping", options=EVERY)(CLIPPED, "clipping")
pattern("local steps on three islands, synchronised in every step", world=3, options={"every": 1})(
    CLIPPED, "every_step"
)


@pattern.each_step(
    "local steps of a language model with tied weights",
    lambda: Words(tied=True),
    options=EVERY,
    steps=STEPS,
)
def language_model(engine: Engine) -> None:
    ids = engine.ids(80, 2, 7)
    engine.update(F.cross_entropy(engine.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@pattern.each_step("local steps with gradients accumulated inside `accumulate()`", options=EVERY, steps=STEPS)
def accumulated(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(engine.loss() / 2)
    engine.update(engine.loss() / 2)


@pattern.each_step(
    "local steps, a part of the model frozen and released again between them", options=EVERY, steps=STEPS
)
def frozen(engine: Engine) -> None:
    engine.model.blocks.requires_grad_(engine.number % 3 != 1)
    engine.train()


@pattern.each_step("local steps, weights clamped by hand after each", options=EVERY, steps=STEPS)
def clamped(engine: Engine) -> None:
    engine.train()
    with engine.gathered(), torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.clamp_(-0.1, 0.1)


@pattern.each_step(
    "local steps of islands that use different blocks, in different orders", Skips, options=EVERY, steps=STEPS
)
def apart(engine: Engine) -> None:
    places = [[0, 2, 1], [1]][engine.rank % 2]
    engine.update(square(engine.model(engine.data(), places)))
