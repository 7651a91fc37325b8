"""The exact batch: whoever holds which tokens, the update is that of one process that holds them all."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerokit
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.streams import LaggingStream, device_way
from zerokit.errors import UsageError
from zerokit.placement import stage_of
from zerokit.runtime.counts import checked

VOCABULARY, STEPS = 13, 20
STAGES: tuple[Any, ...] = (0, 1, 2, 3)
PAIRS: tuple[Any, ...] = ((0, 3), (1, 3), (2, 2), (3, 3))


class Tiny(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def sequences(step: int) -> list[Tensor]:
    """The twelve sequences of a step, of 2 to 20 tokens; every fifth step has few."""
    generator = torch.Generator().manual_seed(step)
    count = 3 if step % 5 == 4 else 12
    lengths = torch.randint(2, 21, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def loss_sum(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """The sum over the predicted tokens of a batch, and their number. Without a sequence both are 0."""
    if not batch:
        return model(torch.zeros(1, dtype=torch.long)).sum() * 0.0, 0
    inputs, targets = torch.cat([s[:-1] for s in batch]), torch.cat([s[1:] for s in batch])
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def plain(clip: float | None) -> list[Tensor]:
    """What one process makes of whole batches."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        total, count = loss_sum(model, sequences(step))
        (total / count).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def parts_of(batch: list[Tensor], micro: int, *, unequal: bool) -> list[list[Tensor]]:
    """This rank's micro-batches: dealt round, or all but a few for rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if unequal:
        own = batch[: -(world - 1)] if world > 1 and rank == 0 else batch[len(batch) - world + rank :][:1]
        own = batch if world == 1 else own
    else:
        own = batch[rank::world]
    return [own[at::micro] for at in range(micro)]


def trained(
    stage: Any,
    *,
    mesh: Any = None,
    micro: int = 2,
    accumulate: bool = True,
    clip: float | None = None,
    unequal: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[float | None]]:
    """On a rank: the weights after all steps, and the counts."""
    model = built()
    kept = stage_of(stage) if isinstance(stage, int) else stage
    options.setdefault("precision", "fp32")
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=kept, mesh=mesh, lr=0.01, bucket_mb=0.001, **options
    )
    counts = []
    for step in range(STEPS):
        parts = parts_of(sequences(step), micro, unequal=unequal)
        for number, part in enumerate(parts):
            waits = accumulate and number + 1 < micro
            with optimizer.accumulate() if waits else nullcontext():
                total, count = loss_sum(model, part)
                optimizer.backward(total, count=count)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(optimizer.last_count)
    with optimizer.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()], counts


def _each(stages: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    return [trained(stage, **options) for stage in stages]


@pytest.mark.full(default=["*-2", "unequal-2x2"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, "2x2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": 0.3},
        {"micro": 3, "accumulate": False, "clip": 0.3},
        {"micro": 1, "unequal": True},
    ],
    ids=["accumulated", "clipped", "reduced each time", "unequal"],
)
def test_any_split_of_a_batch_gives_what_one_process_gives(world: Any, options: dict[str, Any]) -> None:
    mesh = {"mesh": (2, 2)} if world == "2x2" else {}
    stages = PAIRS if mesh else STAGES
    ranks = run_ranks(4 if mesh else world, _each, stages, options | mesh)
    expected = plain(options.get("clip"))
    totals = [sum(len(s) - 1 for s in sequences(step)) for step in range(STEPS)]
    first = ranks[0][0][0]
    for weights, counts in (found for rank in ranks for found in rank):
        assert counts == totals
        for ours, bits, theirs in zip(weights, first, expected, strict=True):
            assert torch.equal(ours, bits), "stages and ranks differ"
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _half() -> list[Any]:
    scale = zerokit.LossScale(value=2.0**6)
    found = [trained(stage, precision="fp16", clip=0.3, loss_scale=scale)[0] for stage in STAGES]
    found += [trained(stage, precision="bf16")[0] for stage in STAGES]
    return found


def test_half_precision_has_equal_bits_at_all_stages() -> None:
    for found in run_ranks(2, _half):
        for at, weights in enumerate(found):
            assert all(map(torch.equal, weights, found[at // 4 * 4]))
        for ours, theirs in zip(found[0], plain(0.3), strict=True):
            assert (ours - theirs).abs().max() < 0.05


def _same_messages() -> list[tuple[int, int]]:
    found = []
    for counted in (False, True):
        model = built()
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=0.01)
        for step in range(2):
            total, count = loss_sum(model, sequences(step))
            optimizer.backward(total, count=count if counted else None)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        traffic = optimizer.traffic()
        found.append((traffic.control_calls, traffic.elements))
    return found


def test_a_count_costs_no_message() -> None:
    for means, sums in run_ranks(2, _same_messages):
        assert means == sums


def _inf_norm() -> tuple[float, float]:
    model = built()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=0.01)
    for part in parts_of(sequences(0), 2, unequal=False):
        total, count = loss_sum(model, part)
        optimizer.backward(total, count=count)
    found = float(optimizer.clip_grad_norm_(1.0, math.inf))
    whole = built()
    total, count = loss_sum(whole, sequences(0))
    (total / count).backward()
    return found, float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0, math.inf))


def test_the_largest_gradient_is_that_of_the_mean() -> None:
    for found, expected in run_ranks(3, _inf_norm):
        assert found == pytest.approx(expected, rel=1e-5)


def _shown() -> list[tuple[Tensor, Tensor]]:
    model = built()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=0.01)
    for part in parts_of(sequences(0), 2, unequal=False):
        total, count = loss_sum(model, part)
        optimizer.backward(total, count=count)
    whole = built()
    total, count = loss_sum(whole, sequences(0))
    (total / count).backward()
    with optimizer.gathered_gradients():
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return list(zip(found, [p.grad for p in whole.parameters() if p.grad is not None], strict=True))


def test_gathered_gradients_are_the_means_over_tokens() -> None:
    for rank in run_ranks(2, _shown):
        for ours, theirs in rank:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _nothing() -> tuple[int, bool, float | None]:
    model = built()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=0.01)
    with optimizer.gathered():
        before = [parameter.detach().clone() for parameter in model.parameters()]
    for clip in (False, True):
        total, count = loss_sum(model, [])
        optimizer.backward(total, count=torch.tensor(count))
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered():
        same = all(map(torch.equal, before, model.parameters()))
    return optimizer.skipped_steps, same, optimizer.last_count


def test_a_step_without_any_token_is_skipped() -> None:
    assert run_ranks(2, _nothing) == [(2, True, 0.0)] * 2


def _on_a_device(stage: Any, *, clip: bool) -> tuple[bool, float | None]:
    """A device whose work comes late: the host learns of other ranks' counts a step later."""
    with device_way(LaggingStream):
        weights, counts = trained(stage, clip=0.3 if clip else None)
    expected = plain(0.3 if clip else None)
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(weights, expected, strict=True))
    return close, counts[0]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_computes_the_same(stage: int, *, clip: bool) -> None:
    first = float(sum(len(s) - 1 for s in sequences(0)))
    assert run_ranks(2, _on_a_device, stage, clip=clip) == [(True, first)] * 2


# ---- what is refused


@pytest.mark.parametrize("count", [-1, math.nan, math.inf, "3", torch.tensor([1, 2]), torch.tensor(-1.0)])
def test_what_is_no_count_is_refused(count: Any) -> None:
    run_ranks(1, _refuses, count)


def _refuses(count: Any) -> None:
    model = built()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=0.01)
    with pytest.raises(UsageError, match="expected a number of at least 0"):
        optimizer.backward(loss_sum(model, sequences(0))[0], count=count)
    total, number = loss_sum(model, sequences(0))
    optimizer.backward(total, count=number)
    for mixed in (None, 1):
        if mixed is None:
            with pytest.raises(UsageError, match="the one adds up sums"):
                optimizer.backward(loss_sum(model, sequences(1))[0])
            optimizer.zero_grad()
            optimizer.backward(loss_sum(model, sequences(1))[0])
        else:
            with pytest.raises(UsageError, match="the one adds up sums"):
                optimizer.backward(loss_sum(model, sequences(1))[0], count=mixed)
    optimizer.zero_grad()
    optimizer.backward(total := loss_sum(model, sequences(1))[0], count=1)
    optimizer.step()
    assert total.isfinite()


def _cleared() -> bool:
    """A count goes with the gradients that are cleared one by one."""
    model, fresh = built(), built()
    found = []
    for each, dropped in ((model, True), (fresh, False)):
        optimizer = zerokit.ZeroOptimizer(each, torch.optim.AdamW, stage=2, precision="fp32", lr=0.01)
        if dropped:
            optimizer.backward(loss_sum(each, sequences(1))[0], count=5)
            for parameter in each.parameters():
                parameter.grad = None
        total, count = loss_sum(each, sequences(0))
        optimizer.backward(total, count=count)
        optimizer.step()
        found.append([weight for _, weight in optimizer.weights()])
    return all(map(torch.equal, *found))


def test_a_count_on_the_host_is_read_there_and_never_copied_to_a_device() -> None:
    """That copy would wait for all that the device has been given."""
    count = torch.tensor(3)
    for_a_gpu, for_the_host = (checked(count, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert not isinstance(for_a_gpu, Tensor)
    assert for_a_gpu == 3
    assert for_the_host is count


def test_a_count_goes_with_its_gradients() -> None:
    assert run_ranks(2, _cleared) == [True, True]


def _mixed_ranks() -> None:
    model = built()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=0.01)
    total, count = loss_sum(model, sequences(dist.get_rank()))
    optimizer.backward(total, count=count if dist.get_rank() else None)
    optimizer.step()


def test_ranks_that_mix_both_forms_are_told_so() -> None:
    outcomes = run_ranks_expecting_errors(2, _mixed_ranks)
    for outcome in outcomes:
        assert outcome.raised("LayoutMismatch")
        assert "had a count= on 1 ranks and none on 1" in outcome.error
