"""The int8 and int4 wires: packing, rounding at random, and runs that resume as they would have gone on."""

from __future__ import annotations

import copy
import warnings
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
from tests.support.on_ranks import on_ranks
from tests.support.training import Run, Trajectory, one_step, trained
from zerokit.runtime.wires import blocks
from zerokit.runtime.wires.blocks import QuantisedWire
from zerokit.runtime.wires.rounding import Draws, rounding_key
from zerokit.sizes import BLOCK_FORMATS

NAMES = tuple(BLOCK_FORMATS)
STAGES = (0, 1, 2, 3)


def _wire(name: str, *key: int) -> QuantisedWire:
    """Rounds at random by the key, or to nearest without one."""
    return QuantisedWire(BLOCK_FORMATS[name], (lambda: rounding_key(*key)) if key else None)


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
def test_a_term_is_near_its_gradient(
    name: str, size: int, piece: int, seed: int, exponent: int, chunk: int
) -> None:
    """Pieces of any multiple of 64, which the layout gives; the error is half a step of the block's scale at most."""
    numel = 64 * piece
    gradient = torch.randn(size * numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    wire = _wire(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(blocks._CHUNK, "cpu", chunk)
        packed = wire.pack(gradient.clone().view(size, -1))
        sent = _unpacked(wire, packed, numel)
        at_random = _wire(name, seed).pack(gradient.view(size, -1))
    assert packed.shape == (size, BLOCK_FORMATS[name].nbytes(numel))
    block, most = wire.block, 2 ** (wire.form.bits - 1) - 1
    rows, errors = gradient.view(size, -1), (gradient - sent).view(size, -1)
    for start in range(0, numel, block):
        part = slice(start, min(start + block, numel))
        for row, error in zip(rows[:, part], errors[:, part], strict=True):
            assert error.abs().max() <= row.abs().max() / most * 0.51
    # Chunks do not change a bit.
    assert torch.equal(wire.pack(gradient.view(size, -1)), packed)
    assert torch.equal(_wire(name, seed).pack(gradient.view(size, -1)), at_random)
    total = torch.ones(size, numel)
    wire.unpack(packed[0], total[0], add=True)
    assert torch.equal(total[0], sent.view(size, -1)[0] + 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_right_on_average(name: str) -> None:
    gradient = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    total, rounds = torch.zeros_like(gradient), 256
    for step in range(rounds):
        wire = _wire(name, step)
        total += _unpacked(wire, wire.pack(gradient[None]), gradient.numel())
    once = _unpacked(wire, wire.pack(gradient[None]), gradient.numel()) - gradient
    error = total / rounds - gradient
    assert error.std() < 1.1 * once.std() / rounds**0.5  # errors of different steps are independent
    assert error.mean().abs() < 5 * once.std() / (rounds * gradient.numel()) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_what_is_not_finite_survives_in_its_block_alone(name: str) -> None:
    block = BLOCK_FORMATS[name].block
    for value in (float("inf"), float("-inf"), float("nan")):
        gradient = torch.zeros(4 * block)
        gradient[block + 3] = value
        gradient[3 * block :] = torch.arange(block) / block
        wire = _wire(name, 3)
        sent = _unpacked(wire, wire.pack(gradient[None]), gradient.numel())
        assert not sent[block : 2 * block].isfinite().any()
        assert torch.equal(sent[:block], torch.zeros(block))
        assert sent[2 * block :].isfinite().all()


def test_keys_differ_and_positions_do_too() -> None:
    gradient = torch.full((256 * 64,), 0.3)
    gradient[::256] = 1.0
    found = {
        tuple(_wire("int8", *key).pack(gradient[None]).flatten().tolist())
        for key in [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4)]
    }
    assert len(found) == 5
    rows = _wire("int8", 0).pack(gradient[None]).view(64, -1)
    assert len({tuple(row.tolist()) for row in rows}) == 64


def test_a_key_is_drawn_once_and_again_by_who_begins_alike() -> None:
    draws = [Draws(rank) for rank in (0, 0, 1)]
    found = [[one.key(unit) for unit in (0, 1, 0)] for one in draws]
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 6
    draws[0].begin(*draws[1].state())
    assert draws[0].key(0) == draws[1].key(0)
    draws[0].begin(7)
    assert draws[0].key(0) != found[0][0]
    draws[2].begin(7)
    draws[1].begin(7)
    assert [draws[1].key(1), draws[1].key(0)] == [draws[0].key(1), rounding_key(0, 7, 1, 0, 0)]


def _train(optimizer: Any, model: Any, case: Any, run: Run, steps: range) -> list[float]:
    found = Trajectory()
    for step in steps:
        one_step(model, optimizer, case, run, step, found)
    return found.losses


@on_ranks(2, NAMES)
def test_a_step_that_overflows_is_the_only_one(name: Any) -> None:
    """One step overflows at every stage; parameters leave gaps in the buckets."""
    found = []
    for stage in STAGES:
        found.append(Trajectory())
        run = Run(stage=stage, steps=4, precision=zerokit.Precision(wire=name, compute="fp16"))
        case, model, optimizer = trained("gpt", run, loss_scale=zerokit.LossScale(value=64.0))
        for step in range(run.steps):
            if step == 2:
                optimizer.backward(case.loss(model, case.batch(0, 1, dist.get_rank())) * float("nan"))
                optimizer.step()
                optimizer.zero_grad()
            one_step(model, optimizer, case, run, step, found[-1])
        assert optimizer.skipped_steps == 1
        assert_equal_bits(found[-1], found[0], f"stage {stage}")


RESUMED = [(0, "int4"), (2, "int8"), (3, "int4")]


@on_ranks(2, RESUMED)
def test_a_run_resumes_to_the_bit(given: tuple[int, Any], tmp_path: Path) -> None:
    """From a checkpoint, and from a rank's state in the midst of what follows it."""
    stage, name = given
    run = Run(stage=stage, micro=2, precision=zerokit.Precision(wire=name, compute="bf16"))
    case, model, optimizer = trained("gpt", run, 3)
    zerokit.save(tmp_path / f"{stage}", optimizer, step=3)
    losses = _train(optimizer, model, case, run, range(3, 5))
    state = copy.deepcopy(optimizer.state_dict())
    losses += _train(optimizer, model, case, run, range(5, 7))
    _, other, resumed = trained("gpt", run, 1)
    zerokit.load(tmp_path / f"{stage}", resumed)
    assert _train(resumed, other, case, run, range(3, 7)) == losses
    resumed.load_state_dict(state)
    assert _train(resumed, other, case, run, range(5, 7)) == losses[4:]


@on_ranks(2)
def test_residuals_of_earlier_versions_are_passed_over_with_a_note(tmp_path: Path) -> None:
    """They were a state of each master that a wire with error feedback kept."""
    run = Run(stage=2, precision=zerokit.Precision(wire="int8"))
    case, model, optimizer = trained("gpt", run, 2)
    for _, master, state in optimizer.runtime.masters():
        state["wire_residual"] = torch.ones_like(master.tensor)
    zerokit.save(tmp_path / "two", optimizer, step=2)
    for _, _, state in optimizer.runtime.masters():
        del state["wire_residual"]
    losses = _train(optimizer, model, case, run, range(2, 4))
    if dist.get_rank() == 0:
        assert zerokit.verify(tmp_path / "two").intact
        zerokit.reshard(tmp_path / "two", 3, tmp_path / "three")
    dist.barrier()
    for name, precision in (("two", run.precision), ("three", "fp32")):
        _, other, resumed = trained("gpt", replace(run, precision=precision), 1)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            zerokit.load(tmp_path / name, resumed)
        told = [str(one.message) for one in noted if "wire_residual is left out" in str(one.message)]
        assert len(told) == (dist.get_rank() == 0)
        assert all("wire_residual" not in state for _, _, state in resumed.runtime.masters())
        if precision is run.precision:
            assert _train(resumed, other, case, run, range(2, 4)) == losses


def test_the_sizes_are_the_published_ones() -> None:
    assert BLOCK_FORMATS["int8"].nbytes(256) == 258
    assert BLOCK_FORMATS["int4"].nbytes(128) == 66
