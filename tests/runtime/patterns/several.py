# mypy: disable-error-code="no-any-return"
"""Several forwards, several models, parts of a model used alone."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import Subject, updates
from tests.runtime.patterns.models import WIDTH, Mlp, chain, square

pattern = Subject(__name__)

# ---- several forwards of one model


@pattern.each_step("two forwards, one loss (Siamese)")
def siamese(engine: Engine) -> None:
    one, two = engine.model(engine.data()), engine.model(engine.data())
    engine.update(square(one - two) + square(one))


@pattern.each_step("two forwards, then two backwards, at times the second one's first", steps=VARIED_STEPS)
def two_and_two(engine: Engine) -> None:
    losses = [engine.loss(), engine.loss()]
    engine.backward(losses.pop(engine.number % 2))
    engine.update(losses.pop())


@pattern.each_step("three forwards, then `backward(a)`, `backward(b + c)`")
def three_and_two(engine: Engine) -> None:
    a, b, c = (engine.loss() for _ in range(3))
    engine.backward(a)
    engine.update(b + c)


@pattern.each_step("a model applied to its own output", chain)
def own_output(engine: Engine) -> None:
    x = engine.data(4, WIDTH)
    for _ in range(3):
        x = engine.model(x)
    engine.update(square(x))


@pattern.each_step("a contrastive loss over all ranks' outputs (`all_gather`)")
def contrastive(engine: Engine) -> None:
    own = engine.model(engine.data())
    others = [torch.zeros_like(own) for _ in range(engine.world)]
    torch.distributed.all_gather(others, own.detach())
    others[engine.rank] = own
    engine.update(F.cross_entropy(own @ torch.cat(others).t(), torch.arange(4) + 4 * engine.rank))


# ---- parts of the model


@pattern.each_step("a submodule called directly before the root, in one loss")
def part_before(engine: Engine) -> None:
    part = square(engine.model.blocks[1](engine.data(4, WIDTH)))
    engine.update(engine.loss() + part)


@pattern.each_step("a submodule called directly after the root, in one loss")
def part_after(engine: Engine) -> None:
    engine.update(engine.loss() + square(engine.model.blocks[1](engine.data(4, WIDTH))))


pattern("a submodule called alone, nothing else")(
    updates(lambda engine: square(engine.model.blocks[1](engine.data(4, WIDTH)))), "part_alone"
)


@pattern.each_step("a method of the model, and the head called on its result")
def method_and_head(engine: Engine) -> None:
    x = engine.model.features(engine.data())
    engine.update(square(engine.model.head(x)) + 0.1 * square(x))


@pattern.each_step("a method of the model under `no_grad`, the head trained (linear probe)")
def probe(engine: Engine) -> None:
    with torch.no_grad():
        x = engine.model.features(engine.data())
    engine.update(square(engine.model.head(x)))


class TwoParts(nn.Module):
    """An encoder and a decoder; the root itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = chain(2), chain(2)


@pattern.each_step("two submodules called one after the other, the root never", TwoParts)
def root_never(engine: Engine) -> None:
    engine.update(square(engine.model.decoder(engine.model.encoder(engine.data(4, WIDTH)))))


@pattern.each_step("two submodules trained in turn (alternating minimization)", TwoParts, steps=VARIED_STEPS)
def in_turn(engine: Engine) -> None:
    parts = [engine.model.encoder, engine.model.decoder]
    engine.update(square(parts[engine.number % 2](engine.data(4, WIDTH))))


# ---- several models


@pattern("a GAN: two models, two optimizers, `detach`, a gradient penalty")
def gan(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1))
    for _ in range(STEPS):
        fake = engine.model(engine.data())
        x = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic.model(x).sum(), x, create_graph=True)
        loss = F.softplus(critic.model(x.detach())).mean() + square(slope)
        critic.update(loss + F.softplus(-critic.model(engine.data())).mean())
        engine.update(F.softplus(-critic.model(fake)).mean())
        critic.zero_grad()


@pattern("a GAN that freezes its critic for the generator's step")
def gan_frozen(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1))
    for _ in range(STEPS):
        critic.model.requires_grad_(True)
        fake = engine.model(engine.data())
        critic.update(critic.model(fake.detach()).mean() - critic.model(engine.data()).mean())
        critic.model.requires_grad_(False)
        engine.update(-critic.model(fake).mean())


@pattern("two models, one joint loss, two optimizers")
def joint(engine: Engine) -> None:
    other = engine.another(Mlp(2))
    for _ in range(STEPS):
        engine.update(square(other.model(engine.model(engine.data()))))
        other.finish()


class Momentum(Mlp):
    """The teacher is a part of the model, frozen (BYOL, MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        teacher = self.first(x).detach()
        with torch.no_grad():
            for block in self.teacher:
                teacher = block(teacher)
        return square(self.features(x) - teacher)


@pattern.each_step("an EMA teacher inside the model, updated inside `gathered()`", Momentum)
def teacher_inside(engine: Engine) -> None:
    engine.update(engine.model(engine.data()))
    with engine.gathered(), torch.no_grad():
        pairs = zip(engine.model.teacher.parameters(), engine.model.blocks.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.1)
