"""The int8 and int4 wires: packing, and residuals on their way through checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.training import Run, Trajectory, one_step, trained
from zerokit.formulas import BLOCK_FORMATS
from zerokit.runtime.collectives import quantised
from zerokit.runtime.collectives.quantised import QuantisedWire, rounding_key

NAMES = tuple(BLOCK_FORMATS)
STAGES = (0, 1, 2, 3)


def _wire(name: str, *key: int, residual: Tensor | None = None) -> QuantisedWire:
    """Rounds at random by the key, or to nearest without one."""
    return QuantisedWire(BLOCK_FORMATS[name], residual, rounding_key(*key) if key else None)


def _unpacked(wire: QuantisedWire, packed: Tensor, numel: int) -> Tensor:
    out = torch.full((packed.shape[0], numel), 7.0)
    for row, piece in zip(packed, out, strict=True):
        wire.unpack(row, piece, add=False)
    return out.view(-1)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 1000),
    st.integers(-30, 30),
    st.sampled_from([128, 1024, 1 << 17]),
)
def test_a_term_and_what_it_lost_are_the_gradient(
    name: str, size: int, piece: int, seed: int, exponent: int, chunk: int
) -> None:
    """Pieces of any multiple of 64, which the layout gives; the error is half a step of the block's scale at most."""
    numel = 64 * piece
    gradient = torch.randn(size * numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    before = torch.randn(size * numel, generator=torch.Generator().manual_seed(seed + 1)) * 2.0**exponent
    residual = before.clone()
    wire = _wire(name, residual=residual)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantised._CHUNK, "cpu", chunk)
        packed = wire.pack(gradient.clone(), size)
        sent = _unpacked(wire, packed, numel)
    assert packed.shape == (size, BLOCK_FORMATS[name].nbytes(numel))
    x = before + gradient
    assert torch.equal(residual, x - sent)
    block, most = wire.block, 2 ** (wire.form.bits - 1) - 1
    for start in range(0, numel, block):
        part = slice(start, min(start + block, numel))
        for row, error in zip(x.view(size, -1)[:, part], residual.view(size, -1)[:, part], strict=True):
            assert error.abs().max() <= row.abs().max() / most * 0.51
    # Neither chunks nor memory for residuals change a bit.
    assert torch.equal(_wire(name).pack(x, size), packed)
    total = torch.ones(size, numel)
    wire.unpack(packed[0], total[0], add=True)
    assert torch.equal(total[0], sent.view(size, -1)[0] + 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_right_on_average(name: str) -> None:
    gradient = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    total, rounds = torch.zeros_like(gradient), 256
    for step in range(rounds):
        wire = _wire(name, step)
        total += _unpacked(wire, wire.pack(gradient, 1), gradient.numel())
    once = _unpacked(wire, wire.pack(gradient, 1), gradient.numel()) - gradient
    error = total / rounds - gradient
    assert error.std() < 1.1 * once.std() / rounds**0.5  # errors of different steps are independent
    assert error.mean().abs() < 5 * once.std() / (rounds * gradient.numel()) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_only_with_feedback_errors_do_not_add_up(name: str) -> None:
    """Over many steps of a gradient with small elements, which rounding to nearest alone would never send."""
    generator, numel = torch.Generator().manual_seed(0), 1 << 12
    slope = torch.randn(numel, generator=generator) * 1e-3
    residual, exact = torch.zeros(numel), torch.zeros(numel)
    fed, alone = torch.zeros(numel), torch.zeros(numel)
    for step in range(100):
        gradient = slope.clone()
        gradient[::128] = 1.0
        exact += gradient
        for wire, sums in ((_wire(name, residual=residual), fed), (_wire(name, step), alone)):
            sums += _unpacked(wire, wire.pack(gradient, 1), numel)
    assert (fed - exact).abs().max() <= 1.02 / (2 ** (wire.form.bits - 1) - 1) / 2
    assert (alone - exact).norm() > 2 * (fed - exact).norm()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_what_is_not_finite_survives_in_its_block_alone(name: str) -> None:
    block = BLOCK_FORMATS[name].block
    for value in (float("inf"), float("-inf"), float("nan")):
        gradient, residual = torch.zeros(4 * block), torch.zeros(4 * block)
        gradient[block + 3] = value
        gradient[3 * block :] = torch.arange(block) / block
        wire = _wire(name, residual=residual)
        sent = _unpacked(wire, wire.pack(gradient, 1), gradient.numel())
        assert not sent[block : 2 * block].isfinite().any()
        assert torch.equal(sent[:block], torch.zeros(block))
        assert sent[2 * block :].isfinite().all()
        assert residual.isfinite().all()


def test_keys_differ_and_positions_do_too() -> None:
    gradient = torch.full((256 * 64,), 0.3)
    gradient[::256] = 1.0
    found = {
        tuple(_wire("int8", *key).pack(gradient, 1).flatten().tolist())
        for key in [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4)]
    }
    assert len(found) == 5
    rows = _wire("int8", 0).pack(gradient, 1).view(64, -1)
    assert len({tuple(row.tolist()) for row in rows}) == 64


def _precision(name: Any, **options: Any) -> zerokit.Precision:
    return zerokit.Precision(wire=name, **options)


def _train(optimizer: Any, model: Any, case: Any, run: Run, steps: range) -> list[float]:
    found = Trajectory()
    for step in steps:
        one_step(model, optimizer, case, run, step, found)
    return found.losses


@on_ranks(2, NAMES)
def test_a_step_that_overflows_is_the_only_one(name: str) -> None:
    """One step overflows at every stage; parameters leave gaps in the buckets."""
    found = []
    for stage in STAGES:
        found.append(Trajectory())
        run = Run(stage=stage, steps=4, precision=_precision(name, compute="fp16"))
        case, model, optimizer = trained("gpt", run, loss_scale=zerokit.LossScale(value=64.0))
        for step in range(run.steps):
            if step == 2:
                optimizer.backward(case.loss(model, case.batch(0, 1, dist.get_rank())) * float("nan"))
                optimizer.step()
                optimizer.zero_grad()
            one_step(model, optimizer, case, run, step, found[-1])
        assert optimizer.skipped_steps == 1
        assert_equal_bits(found[-1], found[0], f"stage {stage}")


def _residual_sum(optimizer: zerokit.ZeroOptimizer) -> list[Tensor]:
    """By unit, the sum over ranks in fp64, of payload alone."""
    found = []
    for unit, rounding in optimizer.runtime.gradients.roundings():
        whole = torch.zeros(unit.unit.numel, dtype=torch.float64)
        if rounding.residual is not None:
            whole[rounding.sent.start : rounding.sent.stop] += rounding.residual
        dist.all_reduce(whole)
        found.append(
            torch.cat([whole[part.memory.start :][: part.parameter.numel] for part in unit.unit.slices])
        )
    return found


def _save_and_go_on(path: str, run: Run) -> tuple[list[float], list[Tensor]]:
    case, model, optimizer = trained("gpt", run, 3)
    before = _residual_sum(optimizer)
    zerokit.save(path, optimizer, step=3)
    after = _residual_sum(optimizer)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    return _train(optimizer, model, case, run, range(3, 6)), after


def _resume(path: str, run: Run) -> tuple[list[float], list[Tensor]]:
    case, model, optimizer = trained("gpt", run, 1)
    zerokit.load(path, optimizer)
    sums = _residual_sum(optimizer)
    return _train(optimizer, model, case, run, range(3, 6)), sums


@pytest.mark.parametrize(
    ("stage", "precision", "world"),
    [
        (2, _precision("int8"), 3),
        (0, _precision("int4"), 1),
        (3, _precision("int8", feedback=False), 3),
    ],
)
def test_a_run_resumes_to_the_bit_and_loses_no_residual(
    tmp_path: Path, stage: int, precision: zerokit.Precision, world: int
) -> None:
    """On two ranks; on another number of them the residuals' sums are those that were saved."""
    run = Run(stage=stage, precision=precision)
    went_on = run_ranks(2, _save_and_go_on, str(tmp_path), run)
    for (losses, sums), (resumed, found) in zip(
        went_on, run_ranks(2, _resume, str(tmp_path), run), strict=True
    ):
        assert resumed == losses
        assert any(part.any() for part in sums) == precision.feedback
        for one, other in zip(sums, found, strict=True):
            assert torch.equal(one, other)
    other_stage = replace(run, stage=3)
    for _, found in run_ranks(world, _resume, str(tmp_path), other_stage):
        for one, other in zip(went_on[0][1], found, strict=True):
            assert torch.equal(one, other)


@on_ranks(2)
def test_a_residual_is_not_dropped_in_silence(tmp_path: Path) -> None:
    _save_and_go_on(str(tmp_path), Run(stage=2, precision=_precision("int8")))
    _, _, optimizer = trained("gpt", Run(stage=2))
    with pytest.raises(zerokit.CheckpointError, match=r"build ZeroOptimizer with Precision\(wire='int8'\)"):
        zerokit.load(tmp_path, optimizer)


def test_the_sizes_are_the_published_ones() -> None:
    assert BLOCK_FORMATS["int8"].nbytes(256) == 258
    assert BLOCK_FORMATS["int4"].nbytes(128) == 66
