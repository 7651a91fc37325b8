"""Half precision: bf16 and fp16 compute with fp32 masters, chosen reduction dtypes, dynamic loss scaling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_each, run_ranks
from tests.support.oracle import train_alone
from tests.support.training import Run, Trajectory, digest, one_step, train_all, trained, whole_weights
from zerokit.placement import stage_of


@pytest.mark.parametrize("name", ["gpt", "mlp_784_256_10", "lora"])
def test_bf16_equals_one_process_with_fp32_masters(name: str) -> None:
    """bf16 gradients, multiplied by 1/N and summed in fp32, step fp32 masters, which are rounded to bf16."""
    run = Run(stage=3, precision="bf16", steps=4, clip=math.inf)
    alone = run_alone(train_alone, name, run, 3)
    for rank, results in enumerate(run_ranks(3, train_all, name, {"run": run})):
        assert_equal_bits(results["run"], alone[rank], f"rank {rank} against one process")


@pytest.mark.parametrize("precision", ["bf16", "fp16", zerokit.Precision(compute="bf16", reduce="bf16")])
def test_half_precision_follows_fp32(precision: Any) -> None:
    half = Run(stage=2, precision=precision, steps=12)
    for results in run_ranks(2, train_all, "mlp_784_256_10", {"half": half, "full": Run(steps=12)}):
        assert results["half"].losses == pytest.approx(results["full"].losses, rel=0.05, abs=0.05)
        assert results["half"].losses != results["full"].losses


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


def _dtypes(case: tuple[str, int]) -> dict[str, Any]:
    precision, stage = case
    model = Spy()
    options: dict[str, Any] = {"precision": precision} if precision else {}
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), lr=1e-3, **options)
    out = model(torch.ones(2, 4), torch.ones(2, dtype=torch.long), nested={"a": [torch.ones(2, 1)]})
    grads_before = [p.grad is None for p in model.parameters()]
    optimizer.backward(out.sum())
    return {
        "seen": dict(model.seen),
        "parameters": {p.dtype for p in model.parameters()},
        "out": out.dtype,
        "inner": model.inner.seen,
        "grads": (grads_before, [p.grad is None for p in model.parameters()]),
        "masters": {p.dtype for group in optimizer.param_groups for p in group["params"]},
        "state_dict": {value.dtype for value in model.state_dict().values()},
    }


def test_what_is_cast_and_what_is_not() -> None:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "": torch.bfloat16}
    cases = list(itertools.product(dtypes, (0, 3)))
    for (precision, stage), (found,) in zip(cases, run_each(1, _dtypes, cases), strict=True):
        state = found.pop("state_dict")
        assert found == {
            "seen": {"x": torch.float32, "mask": torch.long, "nested": torch.float32},
            "inner": dtypes[precision],
            "parameters": {dtypes[precision]},
            "out": torch.float32,  # bfloat16 and float32 add up to float32
            "grads": ([True, True], [False, False]),
            "masters": {torch.float32},
        }, (precision, stage)
        assert len(state) == 1


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


def _casting_layers(stage: int) -> None:
    def run(layer: nn.Module) -> torch.dtype:
        model = nn.Sequential(nn.Identity(), layer)
        optimizer = zerokit.ZeroOptimizer(
            model, torch.optim.SGD, stage=stage_of(stage), precision="bf16", lr=0.1
        )
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


def test_which_modules_of_ones_own_cast() -> None:
    run_each(2, _casting_layers, (1, 3))


# --- fp16: the loss scale ----------------------------------------------------------------------------------


def _scaled_run(stage: int, bad_steps: tuple[int, ...], bad_rank: int, clip: bool) -> dict[str, Any]:
    """Six steps on mlp_10_64_2; in `bad_steps` the loss of one rank is infinite."""
    scale = zerokit.LossScale(value=1024.0, growth=4.0, backoff=0.5, interval=2, floor=1.0)
    run = Run(stage=stage, precision="fp16")
    case, model, optimizer = trained("mlp_10_64_2", run, loss_scale=scale)
    seen: dict[str, Any] = {"scales": [], "skipped": [], "losses": [], "weights": []}
    good = 0
    for step in range(6):
        bad = step in bad_steps
        loss = case.loss(model, case.batch(0, good, dist.get_rank()))
        optimizer.backward(loss * math.inf if bad and dist.get_rank() == bad_rank else loss)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not bad:
            seen["losses"].append(loss.item())
            good += 1
        seen["scales"].append(optimizer.loss_scale)
        seen["skipped"].append(optimizer.skipped_steps)
        seen["weights"].append(digest(whole_weights(model).items()))
    return seen


def _scaled_and_clean(stage: int, clip: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return _scaled_run(stage, (2,), 1, clip), _scaled_run(stage, (), 1, clip)


@pytest.mark.parametrize(("stage", "clip"), [(0, False), (1, True), (2, False), (3, True)])
def test_overflow_on_one_rank_skips_the_step_on_all(stage: int, clip: bool) -> None:
    ranks = run_ranks(2, _scaled_and_clean, stage, clip)
    for found, expected in ranks:
        # Two good steps: ×4. An overflow: ×0.5, and the count of good steps starts again.
        assert found["scales"] == [1024, 4096, 2048, 2048, 8192, 8192]
        assert found["skipped"] == [0, 0, 1, 1, 1, 1]
        assert found["weights"][2] == found["weights"][1], "a skipped step changed the weights"
        assert found["weights"] == ranks[0][0]["weights"]
        # Powers of two change no bit, so the skipped step leaves no trace in the later ones.
        assert found["losses"] == expected["losses"][:5]
        assert expected["scales"] == [1024, 4096, 4096, 16384, 16384, 65536]


def _to_the_floor(stage: int) -> dict[str, Any]:
    model = nn.Linear(3, 1)
    optimizer = zerokit.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage_of(stage),
        precision="fp16",
        loss_scale=zerokit.LossScale(value=8.0, floor=2.0),
        lr=0.1,
    )
    for step in range(10):
        optimizer.backward(model(torch.ones(1, 3)).sum() * math.nan)
        try:
            optimizer.step()
        except zerokit.LossScaleError as error:
            return {"step": step, "text": str(error), "skipped": optimizer.skipped_steps}
        optimizer.zero_grad()
    raise AssertionError("nan losses went on for ten steps")


def test_nan_losses_end_at_the_floor_on_every_rank() -> None:
    for found in itertools.chain(*run_each(2, _to_the_floor, (0, 3))):
        assert found["step"] == 2  # 8 -> 4 -> 2 -> error
        assert "2" in found["text"]


def _norm_in_fp16(precision: str) -> list[float]:
    case, model, optimizer = trained("mlp_784_256_10", Run(precision=precision, optimizer="sgd"))
    trajectory = Trajectory()
    for step in range(3):
        one_step(model, optimizer, case, Run(clip=0.1), step, trajectory)
    return trajectory.norms


def test_norms_are_of_the_unscaled_gradients() -> None:
    half, full = run_ranks(2, _norm_in_fp16, "fp16"), run_ranks(2, _norm_in_fp16, "fp32")
    assert half[0] == pytest.approx(full[0], rel=0.01)


def _plain_backward(stage: int) -> str:
    """`loss.backward()` leaves the loss unscaled; dividing by the scale afterwards would lose the step."""
    model = nn.Linear(3, 1)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage_of(stage), precision="fp16", lr=1.0)
    before = {name: value.clone() for name, value in whole_weights(model).items()}
    try:
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
    except zerokit.UsageError as error:
        return str(error)
    after = whole_weights(model)
    moved = (before["weight"] - after["weight"]).float()
    assert torch.allclose(moved, torch.ones(1, 3), atol=1e-2), f"plain backward moved the weights by {moved}"
    return "optimizer.backward"


def test_plain_backward_under_fp16_is_refused_or_right() -> None:
    for text in itertools.chain(*run_each(2, _plain_backward, (1, 3))):
        assert "optimizer.backward" in text


def _one_scale_for_two() -> tuple[float, float]:
    scale = zerokit.LossScale(value=64.0, interval=1)
    optimizers = []
    for _ in range(2):
        model = nn.Linear(2, 1)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp16", loss_scale=scale, lr=0.1)
        optimizers.append((model, optimizer))
    model, optimizer = optimizers[0]
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    return optimizers[0][1].loss_scale, optimizers[1][1].loss_scale


def test_settings_given_to_two_optimizers_stay_settings() -> None:
    """A `LossScale` says how to begin: one optimizer's growth must not move another's scale."""
    assert run_ranks(1, _one_scale_for_two) == [(128.0, 64.0)]
