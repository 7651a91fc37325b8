# mypy: disable-error-code="no-any-return"
"""Half precision, to 1 % (weights of 16 bits, fp32 masters)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerokit
from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine, Plain
from tests.runtime.patterns.harness import CLIPPED, OUTSIDE, Subject, always, updates, usage
from tests.runtime.patterns.models import WIDTH, Mlp, Words, square

pattern = Subject(__name__)

# bf16 has 8 bits: a loss or a weight that is rounded once more or less differs by 0.4 %.
BF16: dict[str, Any] = {"options": {"precision": "bf16"}, "tolerance": 1e-2}


pattern("bf16", **BF16)(CLIPPED, "usual")


def _accumulated(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(engine.loss())
    engine.train()


pattern.each_step("bf16, accumulated over micro-batches", **BF16)(_accumulated, "accumulated")


@pattern("`Precision(reduce=bf16)`", **BF16)
def reduced_in_half(engine: Engine) -> None:
    options: Any = "bf16" if engine.plain else zerokit.Precision(torch.bfloat16, torch.bfloat16)
    other = engine.another(Mlp(2), precision=options)
    for _ in range(STEPS):
        other.train()


def _narrow(name: Any) -> dict[str, Any]:
    # Other buckets are cut into other blocks.
    return {"options": {"precision": zerokit.Precision(wire=name)}, "tolerance": 5e-2, "equal_bits": False}


pattern('`Precision(wire="int8")`', **_narrow("int8"))(CLIPPED, "int8_wire")
pattern.each_step('`Precision(wire="int4")`, accumulated over micro-batches', **_narrow("int4"))(
    _accumulated, "int4_wire"
)

# Beside stage 0: a reference by hand would have to scale the loss as zerokit does.
FP16: dict[str, Any] = {"options": {"precision": "fp16"}, "reference": "stage 0", "tolerance": 1e-3}
pattern("fp16, the loss scaled", **FP16)(CLIPPED, "scaled")


class Timed(Mlp):
    """A diffusion model's embedding of a time step, in fp32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        angles = time[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 8)
        embedded = torch.cat([angles.sin(), angles.cos()], -1)
        return self.head(self.features(x) + self.embed(embedded.to(self.embed.weight.dtype)))


@pattern.each_step(
    "bf16: sines of an fp32 time step of 1001, given to the model", Timed, steps=VARIED_STEPS, **BF16
)
def time_step(engine: Engine) -> None:
    time = torch.tensor([1001.0, 997.0 - engine.number, 3.0 + engine.rank])
    engine.update(square(engine.model(engine.data(3, 8), time)))


class Counting(Words):
    """An fp32 buffer and integer inputs."""

    def __init__(self) -> None:
        super().__init__(rows=300)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def features(self, ids: Tensor) -> Tensor:
        self.count.add_(1)
        return super().features(ids)


pattern("bf16: integer inputs beyond 256, a buffer that counts", Counting, **BF16)(
    updates(lambda engine: square(engine.model(engine.ids(300, 2, 6)))), "integers"
)


# ---- masters


class Plane(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return -self.weight.sum()


def _edit(engine: Engine, change: Callable[[Tensor], Any]) -> None:
    """Change weights in place; by hand, masters are changed and the weights follow."""
    with torch.no_grad():
        if isinstance(engine, Plain):
            for master in engine.masters.values():
                change(master)
            engine.write_back()
        else:
            for p in engine.model.parameters():
                change(p)


def _small_updates(engine: Engine, between: Callable[[], None]) -> None:
    """Steps of 0.001, which masters add up and bf16 alone would round away at 1."""
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(STEPS):
        engine.update(engine.model())
        between()
        engine.record(engine.weights()["weight"].double().mean())


# Exact: what is recorded is the weight itself, in bf16 on both sides.
EXACT: dict[str, Any] = {"options": {"precision": "bf16", "weight_decay": 0.0}, "tolerance": 2e-6}


@pattern(
    "bf16: updates too small for bf16 add up in the masters, looked at inside `gathered()`", Plane, **EXACT
)
def small_updates(engine: Engine) -> None:
    with engine.gathered():
        _edit(engine, lambda weight: weight.fill_(1.0))

    def between() -> None:
        with engine.gathered():
            engine.record(sum(p.double().mean() for p in engine.model.parameters()))

    _small_updates(engine, between)


@pattern("bf16: fp32 values loaded by `model.load_state_dict()` stay exact in the masters", Plane, **EXACT)
def loaded(engine: Engine) -> None:
    value = torch.full((WIDTH, WIDTH), 1.0035)  # rounded to 1.0 in bf16, and the next update crosses 1.0039
    if isinstance(engine, Plain):
        _edit(engine, lambda weight: weight.copy_(value))
    else:
        engine.model.load_state_dict({"weight": value})
    engine.record(engine.weights()["weight"].double().mean())
    _small_updates(engine, lambda: None)


@pattern("bf16: a model given in fp32 keeps its exact values in the masters", Plane, **EXACT)
def given(engine: Engine) -> None:
    plane = Plane()
    nn.init.constant_(plane.weight, 1.0035)
    other = engine.another(plane, precision="bf16", weight_decay=0.0)
    _small_updates(other, lambda: None)


def _clamp(engine: Engine) -> None:
    _edit(engine, lambda weight: weight.clamp_(max=2.0**-9))


@pattern("bf16: weights clamped after `step()`, masters follow", Plane, refused=OUTSIDE, **EXACT)
def clamped(engine: Engine) -> None:
    _small_updates(engine, lambda: _clamp(engine))


@pattern("bf16: weights clamped inside `gathered()`, masters follow", Plane, **EXACT)
def clamped_gathered(engine: Engine) -> None:
    def between() -> None:
        with engine.gathered():
            _clamp(engine)

    _small_updates(engine, between)


class Normed(nn.Module):
    """Convolutions with BatchNorm, by itself as a unit as well, and one that averages over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.blocks = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 1),
            nn.BatchNorm2d(WIDTH, momentum=None),
            nn.ReLU(),
            nn.InstanceNorm2d(WIDTH),
        )
        self.last = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.first(x)).relu())
        return self.head(self.last(x.mean((2, 3))))


def _with_statistics(engine: Engine, max_norm: float | None) -> None:
    model = engine.model
    for _ in range(STEPS):
        engine.update(engine.loss(4, 3, 6, 6), max_norm)
        statistics = {name: value for name, value in model.named_buffers() if "running" in name}
        assert {value.dtype for value in statistics.values()} == {torch.float32}
        for value in statistics.values():
            engine.record(value.sum())
    model.eval()
    engine.evaluate(engine.data(4, 3, 6, 6))
    model.train()


pattern("bf16: BatchNorm, whose running statistics stay in fp32", Normed, **BF16 | {"reference": "stage 0"})(
    lambda engine: _with_statistics(engine, 0.1), "batch_norm"
)
pattern("fp16: BatchNorm", Normed, **FP16)(lambda engine: _with_statistics(engine, None), "batch_norm_fp16")


# ---- loss scales


@pattern("fp16: a GAN whose generator's loss goes through the critic", **FP16)
def gan_fp16(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1), precision="fp16")
    for _ in range(STEPS):
        fake = engine.model(engine.data())
        critic.update(square(critic.model(fake.detach()) - 1) + critic.loss())
        engine.update(square(critic.model(fake)))
        critic.zero_grad()


@pattern("fp16: one joint loss for two optimizers whose scales differ", **FP16)
def joint_fp16(engine: Engine) -> None:
    other = engine.another(Mlp(2), precision="fp16", loss_scale=zerokit.LossScale(2.0**4))
    for _ in range(STEPS):
        engine.update(square(other.model(engine.model(engine.data()))), 0.1)
        other.clip(0.1)
        other.finish()


@pattern(
    "fp16: gradients of two optimizers' losses in one of them, without `zero_grad()`",
    options={"precision": "fp16"},
    refused=always(usage("scaled by 16", "scaled by 65536", "zero_grad()")),
)
def mixed_fp16(engine: Engine) -> None:
    scale: Any = {} if engine.plain else {"loss_scale": zerokit.LossScale(2.0**4)}
    other = engine.another(Mlp(2), precision="fp16", **scale)
    engine.backward(engine.loss())
    other.update(square(other.model(engine.model(engine.data()))))
