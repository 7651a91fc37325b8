# mypy: disable-error-code="no-any-return"
"""Several forwards, several models, parts of a model used alone; recipes of papers."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import Subject, always, updates, usage
from tests.runtime.patterns.library import adapted
from tests.runtime.patterns.models import WIDTH, Block, Mlp, Words, chain, square

pattern = Subject(__name__)


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


@pattern.each_step(
    "two submodules, one after the other and then in turn, the root never", TwoParts, steps=VARIED_STEPS
)
def root_never(engine: Engine) -> None:
    x, parts = engine.data(4, WIDTH), (engine.model.encoder, engine.model.decoder)
    engine.update(square(parts[engine.number % 2](x) if engine.number > 1 else parts[1](parts[0](x))))


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


@pattern.each_step("SAM: weights moved along the gradient, and back")
def sam(engine: Engine) -> None:
    x = engine.data()
    engine.backward(square(engine.model(x)))
    with engine.gathered_gradients():
        climb = [0.1 * p.grad.detach().clone() for p in engine.model.parameters()]
    engine.zero_grad()
    _move(engine, climb, 1.0)
    engine.backward(square(engine.model(x)))
    _move(engine, climb, -1.0)
    engine.finish()


def _move(engine: Engine, steps: list[Tensor], sign: float) -> None:
    with engine.gathered(), torch.no_grad():
        for parameter, step in zip(engine.model.parameters(), steps, strict=True):
            parameter.add_(step, alpha=sign)


@pattern("PCGrad: gradients of two losses put into `p.grad`", refused=always(usage("gathered_gradients()")))
def pcgrad(engine: Engine) -> None:
    output = engine.model(engine.data())
    parameters = list(engine.model.parameters())
    one = torch.autograd.grad(square(output), parameters, retain_graph=True)
    two = torch.autograd.grad(output.abs().mean(), parameters)
    engine.record(one[0].sum())
    for parameter, a, b in zip(parameters, one, two, strict=True):
        parameter.grad = a + b


@pattern("a prompt that is learnt outside of the model")
def prompt(engine: Engine) -> None:
    learnt = nn.Parameter(torch.zeros(8))
    outer = torch.optim.SGD([learnt], lr=0.1)
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data() + learnt)))
        assert learnt.grad is not None
        dist.all_reduce(learnt.grad)
        learnt.grad /= engine.world
        outer.step()
        outer.zero_grad()


class Exits(nn.Module):
    """A head at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(4))


@pattern.each_step("local losses: blocks called one by one, a backward for each", Exits)
def local_losses(engine: Engine) -> None:
    x = engine.data(4, WIDTH)
    for block, head in zip(engine.model.blocks, engine.model.heads, strict=True):
        x = block(x.detach())
        engine.backward(square(head(x)))
    engine.finish()


@pattern.features("backward passes inside forward: of a local loss, and `inputs=` of an activation")
def backward_within(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        square(block(x.detach())).backward()
        moved: Any = x.detach().requires_grad_()
        square(block(moved)).backward(inputs=[moved])
        x = block(x - moved.grad)
    return x


OWN_LOSS = updates(lambda engine: engine.model(engine.ids(80, 4, 6)))


@pattern.model("cross entropy by checkpointed chunks over `self.head.weight`, inside forward", OWN_LOSS)
class Chunked(Words):
    def forward(self, ids: Tensor) -> Tensor:
        def part(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(hidden, self.head.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        parts = zip(self.features(ids).chunk(2), ids.chunk(2), strict=True)
        losses = [checkpoint(part, hidden, targets, use_reentrant=False) for hidden, targets in parts]
        return torch.stack(losses).sum() / ids.numel()


class _EarlyGradients(torch.autograd.Function):
    """Gradients are made in forward, as fused kernels of linear cross entropy do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(*own), targets)
            ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * outer[0], of_weight * outer[0], None


@pattern.model("a fused linear cross entropy, which makes gradients in forward", OWN_LOSS)
class Fused(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.features(ids)
        return _EarlyGradients.apply(x.flatten(0, 1), self.head.weight, ids.flatten())  # type: ignore[no-untyped-call]


@pattern.each_step("LoRA merged into the frozen weights to evaluate, and taken out again", adapted)
def merged(engine: Engine) -> None:
    engine.update(engine.loss(4, WIDTH))
    for sign in (1, -1):
        with engine.gathered(), torch.no_grad():
            for block in engine.model:
                block.base.weight.add_(block.up.weight @ block.down.weight, alpha=sign)
        engine.evaluate(torch.ones(2, WIDTH))


@pattern.each_step("`functional_call` with changed weights, inside `gathered()`")
def perturbed(engine: Engine) -> None:
    engine.train()
    with engine.gathered():
        weights = {name: 1.01 * p.detach() for name, p in engine.model.named_parameters()}
        engine.record(square(torch.func.functional_call(engine.model, weights, torch.ones(2, 8))))


@pattern.each_step("forward-mode derivatives of the model's input")
def forward_mode(engine: Engine) -> None:
    forward_ad, x = torch.autograd.forward_ad, engine.data()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning), forward_ad.dual_level():
        output = engine.model(forward_ad.make_dual(x, torch.ones_like(x)))
        engine.record(forward_ad.unpack_dual(output).tangent.sum())
    engine.update(square(engine.model(x)))


@pattern("the best weights kept by `copy.deepcopy(model.state_dict())`, loaded at the end")
def best_weights(engine: Engine) -> None:
    for _ in range(STEPS):
        best = copy.deepcopy(engine.model.state_dict())
        engine.train()
    engine.model.load_state_dict(best)
    engine.train()


@pattern.each_step("`state_dict(destination=…, prefix=…)` between two micro-batches")
def prefixed(engine: Engine) -> None:
    engine.backward(engine.loss())
    into: Any = OrderedDict()
    into._metadata = OrderedDict()
    engine.model.state_dict(destination=into, prefix="model.")
    assert all(name.startswith("model.") for name in into)
    engine.record(torch.stack([value.abs().sum() for value in into.values()]).sum())
    engine.train()


@pattern.each_step("`load_state_dict(strict=False)` of one block's names")
def one_block(engine: Engine) -> None:
    given = {n: 0.5 * value for n, value in engine.model.state_dict().items() if "blocks.1" in n}
    engine.train()
    engine.model.load_state_dict(given, strict=False)


@pattern("`load_state_dict(assign=True)`", refused=always(usage("assign=True", "copied")))
def assigned(engine: Engine) -> None:
    engine.train()
    engine.model.load_state_dict({n: v.clone() for n, v in engine.model.state_dict().items()}, assign=True)
