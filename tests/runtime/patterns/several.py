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


@pattern.each_step("two forwards, one loss (Siamese)", Mlp)
def siamese(engine: Engine) -> None:
    one, two = engine.model(engine.data(4, 8)), engine.model(engine.data(4, 8))
    engine.update(square(one - two) + square(one))


class Siamese(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return square(super().forward(x) - super().forward(y) + 1)


pattern("a model that runs all its units twice in one forward", Siamese)(
    updates(lambda engine: engine.model(engine.data(4, 8), engine.data(4, 8))), "siamese_inside"
)


@pattern.each_step("two forwards, then two backwards", Mlp)
def two_and_two(engine: Engine) -> None:
    one, two = square(engine.model(engine.data(4, 8))), square(engine.model(engine.data(4, 8)))
    engine.backward(one)
    engine.update(two)


@pattern.each_step("three forwards, then `backward(a)`, `backward(b + c)`", Mlp)
def three_and_two(engine: Engine) -> None:
    a, b, c = (square(engine.model(engine.data(4, 8))) for _ in range(3))
    engine.backward(a)
    engine.update(b + c)


@pattern.each_step("two forwards, the second one's backward first", Mlp)
def crossed(engine: Engine) -> None:
    one, two = square(engine.model(engine.data(4, 8))), square(engine.model(engine.data(4, 8)))
    engine.backward(two)
    engine.update(one)


@pattern.each_step("a model applied to its own output", lambda: chain(3))
def own_output(engine: Engine) -> None:
    x = engine.data(4, WIDTH)
    for _ in range(3):
        x = engine.model(x)
    engine.update(square(x))


@pattern.each_step("generation under `no_grad`, then a loss of what was generated (policy gradient)", Mlp)
def policy_gradient(engine: Engine) -> None:
    x = engine.data(4, 8)
    with torch.no_grad():
        for _ in range(3):
            x = torch.tanh(engine.model(x))
    engine.update(-(engine.model(x).log_softmax(-1)[:, 0] * x.sum(-1)).mean())


@pattern.each_step("forwards of several batches, kept, differentiated one by one at the end", Mlp)
def kept(engine: Engine) -> None:
    losses = [square(engine.model(engine.data(4, 8))) for _ in range(3)]
    for loss in losses:
        engine.backward(loss / 3)
        engine.record(loss)
    engine.step()
    engine.zero_grad()


@pattern.each_step("a contrastive loss over all ranks' outputs (`all_gather`)", Mlp)
def contrastive(engine: Engine) -> None:
    own = engine.model(engine.data(4, 8))
    others = [torch.zeros_like(own) for _ in range(engine.world)]
    torch.distributed.all_gather(others, own.detach())
    others[engine.rank] = own
    engine.update(F.cross_entropy(own @ torch.cat(others).t(), torch.arange(4) + 4 * engine.rank))


# ---- parts of the model


@pattern.each_step("a submodule called directly before the root, in one loss", Mlp)
def part_before(engine: Engine) -> None:
    part = square(engine.model.blocks[1](engine.data(4, WIDTH)))
    engine.update(square(engine.model(engine.data(4, 8))) + part)


@pattern.each_step("a submodule called directly after the root, in one loss", Mlp)
def part_after(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    engine.update(loss + square(engine.model.blocks[1](engine.data(4, WIDTH))))


pattern("a submodule called alone, nothing else", Mlp)(
    updates(lambda engine: square(engine.model.blocks[1](engine.data(4, WIDTH)))), "part_alone"
)
pattern("a method of the model that calls its units (`model.features(x)`)", Mlp)(
    updates(lambda engine: square(engine.model.features(engine.data(4, 8)))), "method"
)


@pattern.each_step("a method of the model, and the head called on its result", Mlp)
def method_and_head(engine: Engine) -> None:
    x = engine.model.features(engine.data(4, 8))
    engine.update(square(engine.model.head(x)) + 0.1 * square(x))


@pattern.each_step("a method of the model under `no_grad`, the head trained (linear probe)", Mlp)
def probe(engine: Engine) -> None:
    with torch.no_grad():
        x = engine.model.features(engine.data(4, 8))
    engine.update(square(engine.model.head(x)))


class TwoParts(nn.Module):
    """An encoder and a decoder; the root itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = chain(2), chain(2)


@pattern.each_step("two submodules called one after the other, the root never", TwoParts)
def root_never(engine: Engine) -> None:
    code = engine.model.encoder(engine.data(4, WIDTH))
    engine.update(square(engine.model.decoder(code)))


@pattern("two submodules trained in turn (alternating minimization)", TwoParts)
def in_turn(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        parts = [engine.model.encoder, engine.model.decoder]
        engine.update(square(parts[step % 2](engine.data(4, WIDTH))))


# ---- several models


@pattern("a GAN: two models, two optimizers, `detach`", Mlp)
def gan(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1))
    for _ in range(STEPS):
        fake = engine.model(engine.data(4, 8))
        loss = F.softplus(critic.model(fake.detach())).mean()
        critic.update(loss + F.softplus(-critic.model(engine.data(4, 8))).mean())
        engine.update(F.softplus(-critic.model(fake)).mean())
        critic.zero_grad()


@pattern("a GAN that freezes its critic for the generator's step", Mlp)
def gan_frozen(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1))
    for _ in range(STEPS):
        critic.model.requires_grad_(True)
        fake = engine.model(engine.data(4, 8))
        critic.update(critic.model(fake.detach()).mean() - critic.model(engine.data(4, 8)).mean())
        critic.model.requires_grad_(False)
        engine.update(-critic.model(fake).mean())


@pattern("a GAN with a gradient penalty", Mlp)
def gan_penalty(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1))
    for _ in range(STEPS):
        fake = engine.model(engine.data(4, 8))
        x = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic.model(x).sum(), x, create_graph=True)
        critic.update(critic.model(x.detach()).mean() + square(slope))
        engine.update(-critic.model(fake).mean())
        critic.zero_grad()


@pattern("two models, one joint loss, two optimizers", Mlp)
def joint(engine: Engine) -> None:
    other = engine.another(Mlp(2))
    for _ in range(STEPS):
        loss = square(other.model(engine.model(engine.data(4, 8))))
        engine.record(loss)
        engine.backward(loss)
        for each in (engine, other):
            each.step()
            each.zero_grad()


@pattern("two optimizers in alternate steps", Mlp)
def alternate(engine: Engine) -> None:
    other = engine.another(Mlp(2))
    for step in range(VARIED_STEPS):
        each = (engine, other)[step % 2]
        each.update(square(each.model(engine.data(4, 8))))


@pattern("distillation from a frozen teacher outside", Mlp)
def distillation(engine: Engine) -> None:
    teacher = Mlp(1).requires_grad_(False)
    for _ in range(STEPS):
        x = engine.data(4, 8)
        engine.update(square(engine.model(x) - teacher(x)))


class Student(Mlp):
    """Its teacher is copied before it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["teacher"] = copy.deepcopy(self).requires_grad_(False)


@pattern("an EMA teacher outside, updated from `model.state_dict()`", Student)
def ema_teacher(engine: Engine) -> None:
    teacher = engine.model.__dict__["teacher"]
    for _ in range(STEPS):
        x = engine.data(4, 8)
        engine.update(square(engine.model(x) - teacher(x + 1)))
        state = engine.model.state_dict()
        with torch.no_grad():
            for name, p in teacher.named_parameters():
                p.lerp_(state[name], 0.1)


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
    engine.update(engine.model(engine.data(4, 8)))
    with engine.gathered(), torch.no_grad():
        pairs = zip(engine.model.teacher.parameters(), engine.model.blocks.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.1)
