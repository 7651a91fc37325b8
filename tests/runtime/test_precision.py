"""Half precision: bf16 and fp16 compute with fp32 masters, chosen reduction dtypes, dynamic loss scaling."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.oracle import train_alone
from tests.support.training import (
    Run,
    Trajectory,
    digest,
    mixed,
    train_all,
    train_zero,
    trained,
    whole_weights,
)
from zerokit.runtime.precision import DtypeName


@pytest.mark.parametrize("name", ["gpt", "mlp_784_256_10", "lora"])
def test_bf16_equals_one_process_with_fp32_masters(name: str) -> None:
    """bf16 gradients, multiplied by 1/N and summed in fp32, step fp32 masters, which are rounded to bf16."""
    run = Run(stage=3, precision="bf16", steps=4, clip=math.inf)
    alone = run_alone(train_alone, name, run, 3)
    for rank, results in enumerate(run_ranks(3, train_all, name, {"run": run})):
        assert_equal_bits(results["run"], alone[rank], f"rank {rank} against one process")


NORMS = [f"blocks.{block}.norm{number}" for block in range(3) for number in (1, 2)]
#: A case and its precision: norms, a whole block, a part of a block of blocks; the reverse; and a frozen part.
BY_MODULE: list[tuple[str, dict[str, str]]] = [
    ("gpt", dict.fromkeys([*NORMS, "norm"], "fp32") | {"*": "bf16"}),
    ("gpt", {"blocks.1": "fp32", "blocks.2.mlp.2": "fp32", "*": "bf16"}),
    ("gpt", {"blocks.0.attention": "bf16", "norm": "bf16", "*": "fp32"}),
    ("lora", {"blocks.0": "fp32", "blocks.1.base": "fp32", "*": "bf16"}),
]


def _by_module(name: str, precision: dict[str, str]) -> dict[str, Trajectory]:
    stages = [*range(4), mixed(name, 3, 1, 2)]
    return train_all(
        name, {str(s): Run(stage=s, precision=precision, steps=4, clip=math.inf) for s in stages}
    )


@pytest.mark.full(default="2-*-precision[03]")
@pytest.mark.parametrize(("name", "precision"), BY_MODULE)
@pytest.mark.parametrize("world", [1, 2])
def test_modules_of_another_precision_equal_one_process(
    name: str, precision: dict[str, str], world: int
) -> None:
    """Plain torch with these modules in their dtype, and casts of what enters and leaves them; at every stage."""
    run = Run(precision=precision, steps=4, clip=math.inf)
    alone = run_alone(train_alone, name, run, world)
    for rank, results in enumerate(run_ranks(world, _by_module, name, precision)):
        for stage, found in results.items():
            assert_equal_bits(found, alone[rank], f"rank {rank}, stage {stage}")
    uniform = run_alone(train_alone, name, replace(run, precision=precision["*"]), world)
    assert uniform[0].losses != alone[0].losses


@pytest.mark.parametrize("precision", ["bf16", "fp16", zerokit.Precision(compute="bf16", reduce="bf16")])
def test_half_precision_follows_fp32(precision: Any) -> None:
    half = Run(stage=2, precision=precision, steps=12)
    for results in run_ranks(2, train_all, "mlp_784_256_10", {"half": half, "full": Run(steps=12)}):
        assert results["half"].losses == pytest.approx(results["full"].losses, rel=0.05, abs=0.05)
        assert results["half"].losses != results["full"].losses


class Plane(nn.Module):
    """One matrix, whose gradient is -1."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 64), value))

    def forward(self) -> Tensor:
        return -self.weight.sum()


@on_ranks(2, itertools.product(("given", "loaded", "filled", "clamped"), range(4)))
def test_masters_add_up_what_is_too_small_for_bf16(given: tuple[str, Any]) -> None:
    """They take values of fp32 exactly, and follow what is changed by hand; looking at weights changes nothing."""
    how, stage = given
    # 1.0035 is rounded to 1.0 in bf16, and the next update crosses 1.0039.
    expected = torch.tensor({"filled": 1.0, "clamped": 0.0}.get(how, 1.0035))
    model = Plane(float(expected) if how == "given" else 0.0)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision="bf16", lr=1e-3)
    if how == "loaded":
        model.load_state_dict({"weight": torch.full((64, 64), float(expected))})
    if how == "filled":
        with optimizer.gathered(), torch.no_grad():
            model.weight.fill_(expected)
    for _ in range(5):
        optimizer.backward(model())
        optimizer.step()
        optimizer.zero_grad()
        expected += 1e-3
        if how == "clamped":
            expected.clamp_(max=2.0**-9)
            with optimizer.gathered() if stage == 3 else contextlib.nullcontext(), torch.no_grad():
                model.weight.clamp_(max=2.0**-9)
        with optimizer.gathered():
            assert bool((model.weight == expected.bfloat16()).all())


class SpyLinear(nn.Linear):
    """Reports the dtypes of its inputs, which meet its weight."""

    seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return super().forward(x)


class Spy(nn.Module):
    """Reports the dtypes that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SpyLinear(4, 1)
        self.seen: list[tuple[str, torch.dtype]] = []

    def forward(self, x: Tensor, mask: Tensor, *, nested: dict[str, list[Tensor]]) -> Tensor:
        self.seen += [("x", x.dtype), ("mask", mask.dtype), ("nested", nested["a"][0].dtype)]
        return self.inner(x) + nested["a"][0]  # type: ignore[no-any-return]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "": torch.bfloat16}


@on_ranks(1, itertools.product(DTYPES, (0, 3)))
def test_what_is_cast_and_what_is_not(given: tuple[str, Any]) -> None:
    precision, stage = given
    model = Spy()
    options: dict[str, Any] = {"precision": precision} if precision else {}
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-3, **options)
    out = model(torch.ones(2, 4), torch.ones(2, dtype=torch.long), nested={"a": [torch.ones(2, 1)]})
    assert out.dtype == torch.float32  # bfloat16 and float32 add up to float32
    assert dict(model.seen) == {"x": torch.float32, "mask": torch.long, "nested": torch.float32}
    assert model.inner.seen == DTYPES[precision]
    assert {p.dtype for p in model.parameters()} == {DTYPES[precision]}
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
    assert len({value.dtype for value in model.state_dict().values()}) == 1
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(out.sum())
    assert not any(p.grad is None for p in model.parameters())


class Beside(nn.Module):
    """Parameters of its own beside a module that has some: it gets inputs as they are."""

    def __init__(self, *, product: bool, casts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4) if product else torch.ones(4))
        self.inner = SpyLinear(4, 1)
        self.product, self.casts = product, casts
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype) if self.casts else x
        x = x @ self.weight if self.product else x * self.weight
        self.seen = x.dtype
        return self.inner(x)  # type: ignore[no-any-return]


class Holder(nn.Module):
    """Parameters in a list, which nobody calls, beside a module without any."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4, 4))
        self.weights: Any = nn.ParameterDict({"0": weight}) if named else nn.ParameterList([weight])
        self.first: Any = "0" if named else 0
        self.rest = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x @ self.weights[self.first])  # type: ignore[no-any-return]


@on_ranks(2, (1, 3))
def test_which_modules_of_ones_own_cast(stage: Any) -> None:
    def run(layer: nn.Module) -> torch.dtype:
        model = nn.Sequential(nn.Identity(), layer)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision="bf16", lr=0.1)
        for _ in range(2):  # the second pass has fewer hooks
            out = model(torch.ones(2, 4))
            optimizer.backward(out.float().sum())
            optimizer.step()
            optimizer.zero_grad()
        return out.dtype  # type: ignore[no-any-return]

    assert run(Holder(named=False)) == torch.bfloat16
    assert run(Holder(named=True)) == torch.bfloat16
    for product, casts in ((False, False), (False, True), (True, True)):
        layer = Beside(product=product, casts=casts)
        assert run(layer) == torch.bfloat16
        assert layer.inner.seen == torch.bfloat16
        assert layer.seen == (torch.bfloat16 if casts else torch.float32)
    with pytest.raises(RuntimeError, match="same dtype") as refused:
        run(Beside(product=True, casts=False))
    dist.barrier()  # the other rank may still be reading from this one's model
    del refused


class Router(nn.Module):
    """A parameter of its own beside a module with some; probabilities, indices and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = SpyLinear(8, 4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, mask: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        self.seen = [x.dtype, mask["keep"].dtype, mask["bias"].dtype]
        logits = self.gate(x) + self.bias + mask["bias"]
        return (
            logits.softmax(-1),
            {"best": logits.argmax(-1), "wide": logits.double()},
            logits.square().mean(),
        )


class Routed(nn.Module):
    """Experts behind routers in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.experts[0](x)
        auxiliary = torch.zeros(())
        for router in self.routers:
            mask = {"keep": torch.ones(len(x), dtype=torch.bool), "bias": torch.zeros(4, dtype=x.dtype)}
            shares, choice, loss = router(x, mask=mask)
            self.seen = [shares.dtype, choice["best"].dtype, choice["wide"].dtype, loss.dtype]
            x = x + sum(shares[:, [k]] * self.experts[k](x) for k in range(4))
            auxiliary = auxiliary + loss
        x = self.norm(x)
        self.seen.append(x.dtype)
        return x.float().square().mean() + auxiliary


@on_ranks(2, itertools.product(("bf16", "fp16"), (0, 2, 3)))
def test_what_enters_and_leaves_a_module_of_another_precision(given: tuple[Any, Any]) -> None:
    precision, stage = given
    half = DTYPES[precision]
    model = Routed()
    by_module: Any = {"routers": "fp32", "norm": "fp32", "*": precision}
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision=by_module, lr=1e-3)
    for step in range(3):
        optimizer.backward(model(torch.randn(4, 8)))
        held = optimizer.memory()
        optimizer.step()
        optimizer.zero_grad()
        assert not step or held == optimizer.predicted_memory()
    assert optimizer.traffic().by_operation == optimizer.predicted_traffic().by_operation
    for router in model.routers:
        assert isinstance(router, Router)
        assert router.seen == [torch.float32, torch.bool, torch.float32]
        assert router.gate.seen == torch.float32
    # Scalars, indices, and what has another dtype than the module's stay what they are.
    assert model.seen == [half, torch.long, torch.float64, torch.float32, half]
    with optimizer.gathered():
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {
        name: half if name.startswith("experts") else torch.float32 for name, _ in model.named_parameters()
    }
    assert {weight.dtype for _, weight in optimizer.weights()} == {torch.float32}
    assert "compute of routers" in optimizer.precision.as_dict()
    assert (optimizer.loss_scale > 1) == (precision == "fp16")
    with torch.autocast("cpu", torch.bfloat16):  # which decides itself
        assert model(torch.randn(4, 8)).dtype == torch.float32


@on_ranks(2, itertools.product((1, 3), (("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "fp16"), "fp32")))
def test_a_module_may_return_another_dtype(given: tuple[Any, Any]) -> None:
    stage, own = given
    first, listed, last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
    model = nn.Sequential(first, nn.ModuleList([listed]), last)
    model.forward = lambda x: last(first(x))  # type: ignore[method-assign]
    precision: Any = {"2": own, "1": own, "*": "bf16"}
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision=precision, lr=0.1)
    compute, returned = map(DTYPES.__getitem__, own if isinstance(own, tuple) else (own, "bf16"))
    x = torch.randn(4, 8)
    for _ in range(2):
        out = model(x)
        assert out.dtype == returned
        optimizer.backward(out.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered(), torch.no_grad():
        hidden = nn.functional.linear(x.bfloat16(), first.weight, first.bias)
        wide = nn.functional.linear(hidden.to(compute), last.weight, last.bias)
    with torch.no_grad():
        assert torch.equal(model(x), wide.to(returned))
        alone = listed(x)  # a list is never called: what is in it stands for it
    assert alone.dtype == returned
    again = zerokit.Precision(compute="bf16", modules={"2": own, "1": own})
    assert optimizer.precision.by_module == again.by_module
    assert optimizer.precision.as_dict() == again.as_dict()
    assert ("output of 2" in again.as_dict()) == isinstance(own, tuple)


@on_ranks(1)
def test_precisions_by_module_that_are_refused() -> None:
    def build(precision: Any, model: nn.Module | None = None) -> zerokit.ZeroOptimizer:
        return zerokit.ZeroOptimizer(model or Routed(), torch.optim.AdamW, precision=precision)

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    wide = zerokit.Precision(compute="bf16", reduce="bf16")
    for precision, model, words in (
        ({"norm": "fp32"}, None, "add '*' for the rest of the model"),
        ({"router": "fp32", "*": "bf16"}, None, "'router' is no module of the model, but 'routers'"),
        ({"norm": "bf17", "*": "bf16"}, None, "'norm' has 'bf17': expected what the module computes in"),
        ({"norm": ("fp32", "fp8"), "*": "bf16"}, None, "or a pair with what it returns"),
        ({"norm": ("fp32",), "*": "bf16"}, None, "or a pair with what it returns"),
        ({"norm": wide, "*": "bf16"}, None, "reduce, master and wire are one for all, those of '*'"),
        ({"0": "fp32", "*": "bf16"}, tied, "0.weight and 1.weight are one parameter"),
        (lambda path: "fp32", None, "by module, {'router': 'fp32', '*': 'bf16'}"),
    ):
        with pytest.raises(zerokit.UsageError, match=re.escape(words)):
            build(precision, model)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Routed()) for _ in range(2)))
    build({"norm": "fp32", "*": "bf16"}, blocks)
    in_fp32 = {name for name, parameter in blocks.named_parameters() if parameter.dtype == torch.float32}
    assert in_fp32 == {name for name, _ in blocks.named_parameters() if ".1.norm." in name}
    own = zerokit.Precision(compute="bf16", reduce="bf16", modules={"norm": "fp32"})
    assert build({"norm": "fp32", "*": wide}).precision == own == build(own).precision
    assert hash(own) != hash(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build({"norm": "fp32", "*": "bf16"}, Routed().bfloat16())  # asked for, so no warning of wider weights


def _scaled_run(stage: int, bad_step: int | None, clip: bool) -> tuple[list[float], ...]:
    """Losses, scales, skipped steps and weights of six steps; in `bad_step` the loss of rank 1 is infinite."""
    scale = zerokit.LossScale(value=1024.0, growth=4.0, backoff=0.5, interval=2, floor=1.0)
    run = Run(stage=stage, precision="fp16")
    case, model, optimizer = trained("mlp_10_64_2", run, loss_scale=scale)
    seen: tuple[list[Any], ...] = [], [], [], []
    for step in range(6):
        loss = case.loss(model, case.batch(0, len(seen[0]), dist.get_rank()))
        optimizer.backward(loss * math.inf if step == bad_step and dist.get_rank() == 1 else loss)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step != bad_step:
            seen[0].append(loss.item())
        seen[1].append(optimizer.loss_scale)
        seen[2].append(optimizer.skipped_steps)
        seen[3].append(digest(whole_weights(model).items()))
    return seen


@on_ranks(2, [(0, False), (1, True), (2, False), (3, True)])
def test_overflow_on_one_rank_skips_the_step_on_all(given: tuple[int, bool]) -> None:
    stage, clip = given
    losses, scales, skipped, weights = _scaled_run(stage, 2, clip)
    expected, clean_scales, *_ = _scaled_run(stage, None, clip)
    # Two good steps: ×4. An overflow: ×0.5, and the count of good steps starts again.
    assert scales == [1024, 4096, 2048, 2048, 8192, 8192]
    assert clean_scales == [1024, 4096, 4096, 16384, 16384, 65536]
    assert skipped == [0, 0, 1, 1, 1, 1]
    assert weights[2] == weights[1], "a skipped step changed the weights"
    others: list[Any] = [None, None]
    dist.all_gather_object(others, weights)
    assert others == [weights, weights]
    # Powers of two change no bit, so the skipped step leaves no trace in the later ones.
    assert losses == expected[:5]


def _linear(**options: Any) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    model = nn.Linear(3, 1)
    return model, zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp16", lr=1.0, **options)


@on_ranks(2, (0, 3))
def test_nan_losses_end_at_the_floor_on_every_rank(stage: int) -> None:
    model, optimizer = _linear(stage=stage, loss_scale=zerokit.LossScale(value=8.0, floor=2.0))
    for step in range(3):
        optimizer.backward(model(torch.ones(1, 3)).sum() * math.nan)
        ends = step == 2  # 8 -> 4 -> 2 -> error
        with pytest.raises(zerokit.LossScaleError, match="2") if ends else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_norms_are_of_the_unscaled_gradients() -> None:
    half, full = (
        train_zero("mlp_784_256_10", Run(precision=precision, optimizer="sgd", clip=0.1, steps=3)).norms
        for precision in ("fp16", "fp32")
    )
    assert half == pytest.approx(full, rel=0.01)


@on_ranks(2, (1, 3))
def test_plain_backward_under_fp16_is_refused(stage: int) -> None:
    """`loss.backward()` leaves the loss unscaled; dividing by the scale afterwards would lose the step."""
    model, _ = _linear(stage=stage)
    with pytest.raises(zerokit.UsageError, match=r"optimizer\.backward"):
        torch.autograd.backward(model(torch.ones(1, 3)).sum())


def _one_backward_a_step(stage: Any, precision: DtypeName, clip: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    scale = zerokit.LossScale(value=4.0, interval=1)
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage, precision=precision, lr=0.5, loss_scale=scale
    )
    for step in range(4):
        loss = model(torch.linspace(-1, 1, 32).view(2, 16)).float().square().mean()
        if dist.get_rank() != step % 2:
            optimizer.backward(loss)
        if clip:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    weight: Tensor = model.state_dict()["weight"]
    return weight


@on_ranks(2, itertools.product(range(4), (False, True)))
def test_a_rank_that_brings_no_gradients_divides_by_the_scale_of_the_step(given: tuple[int, bool]) -> None:
    """The scale doubles in every step, so that of its own last gradients is another one."""
    half, full = (_one_backward_a_step(given[0], precision, given[1]) for precision in ("fp16", "fp32"))
    assert torch.allclose(half, full, atol=2e-3)


@on_ranks(1)
def test_settings_given_to_two_optimizers_stay_settings() -> None:
    """A `LossScale` says how to begin: one optimizer's growth must not move another's scale."""
    scale = zerokit.LossScale(value=64.0, interval=1)
    (model, optimizer), (_, other) = _linear(loss_scale=scale), _linear(loss_scale=scale)
    optimizer.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert (optimizer.loss_scale, other.loss_scale) == (128.0, 64.0)
