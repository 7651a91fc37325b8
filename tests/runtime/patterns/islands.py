# mypy: disable-error-code="no-any-return"
"""Islands that average their weights once in some steps (`LocalSteps`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import Subject
from tests.runtime.patterns.models import Mlp, Words, square
from tests.runtime.patterns.ranks import Skips

pattern = Subject(__name__)

STEPS = 5
"""Two rounds of two steps, and one step of the third."""
EVERY = {"every": 2}


@pattern("local steps, with clipping", Mlp, options=EVERY)
def clipping(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))), max_norm=0.1)


pattern("local steps on three islands, synchronised in every step", Mlp, world=3, options={"every": 1})(
    clipping, "every_step"
)


@pattern("local steps of a language model with tied weights", lambda: Words(tied=True), options=EVERY)
def language_model(engine: Engine) -> None:
    for _ in range(STEPS):
        ids = engine.ids(80, 2, 7)
        engine.update(F.cross_entropy(engine.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@pattern("local steps with gradients accumulated inside `accumulate()`", Mlp, options=EVERY)
def accumulated(engine: Engine) -> None:
    for _ in range(STEPS):
        with engine.accumulate():
            engine.backward(square(engine.model(engine.data(4, 8))) / 2)
        engine.update(square(engine.model(engine.data(4, 8))) / 2)


@pattern("local steps with OneCycleLR", Mlp, options=EVERY)
def schedule(engine: Engine) -> None:
    cycle = lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.01, total_steps=STEPS)
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        cycle.step()


@pattern("local steps, a part of the model frozen and released again between them", Mlp, options=EVERY)
def frozen(engine: Engine) -> None:
    for step in range(STEPS):
        engine.model.blocks.requires_grad_(step % 3 != 1)
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern("local steps, weights clamped by hand after each", Mlp, options=EVERY)
def clamped(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        with engine.gathered(), torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.clamp_(-0.1, 0.1)


@pattern("local steps of islands that use different blocks, in different orders", Skips, options=EVERY)
def apart(engine: Engine) -> None:
    for _ in range(STEPS):
        places = [[0, 2, 1], [1]][engine.rank % 2]
        engine.update(square(engine.model(engine.data(4, 8), places)))
