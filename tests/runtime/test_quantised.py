"""The int8 and int4 wires: packing by hypothesis, and between real ranks every route, stage, resume and byte."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
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
from tests.support.distributed import AT_ONCE, run_each, run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
from tests.support.recording import plain_unit
from tests.support.streams import PromptStream, device_way
from tests.support.training import SMALL, Run, Trajectory, build_seeded, one_step, train_all, wrap
from zerokit.formulas import BLOCK_FORMATS
from zerokit.runtime.collectives import make_collectives, quantised
from zerokit.runtime.collectives.node import SWITCH
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


# --- packing -----------------------------------------------------------------------------------------------


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


# --- every route, between real ranks -----------------------------------------------------------------------


def _sums(name: str, numels: list[int]) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    for switch in ("1", "0"):
        os.environ[SWITCH] = switch
        collectives = make_collectives(group, torch.device("cpu"), None, units=1)
        for numel in numels:
            unit = plain_unit(0, numel * world, world)
            buckets = [
                torch.randn(numel * world, generator=torch.Generator().manual_seed(peer))
                for peer in range(world)
            ]
            wires = [_wire(name, *key) for key in ((), *((peer,) for peer in range(1, world)))]
            terms = [
                _unpacked(wire, wire.pack(bucket, world), numel).view(world, -1)[rank]
                for wire, bucket in zip(wires, buckets, strict=True)
            ]
            expected = terms[0].clone()
            for term in terms[1:]:
                expected += term
            for way in ("aside", "in place", "add"):
                bucket = buckets[rank].clone()
                out = bucket.view(world, -1)[rank] if way == "in place" else torch.full((numel,), 0.5)
                before = collectives.counters.received_bytes
                wire = wires[rank]
                collectives.reduce_scatter(unit, bucket, out, add=way == "add", wire=wire).wait()
                assert torch.equal(out, expected + 0.5 if way == "add" else expected)
                received = collectives.counters.received_bytes - before
                assert received == (world - 1) * BLOCK_FORMATS[name].nbytes(numel)


@pytest.mark.parametrize("name", NAMES)
def test_every_route_adds_rounded_terms_in_rank_order(name: str) -> None:
    run_ranks(3, _sums, name, [64, 1024, 320_000])


# --- training ----------------------------------------------------------------------------------------------


def _precision(name: Any, **options: Any) -> zerokit.Precision:
    return zerokit.Precision(wire=name, **options)


def _by_every_route(name: str, runs: list[dict[str, Run]]) -> list[dict[str, Trajectory]]:
    found = []
    for switch, mine in zip(("1", "0"), runs, strict=False):
        os.environ[SWITCH] = switch
        found.append(train_all(name, mine))
    with device_way(PromptStream):
        return [*found, train_all(name, runs[2])]


@pytest.mark.parametrize(
    ("name", "world", "precision", "options"),
    [
        ("gpt", 2, _precision("int8"), {}),
        ("gpt", 3, _precision("int4", compute="bf16"), {"micro": 2}),
        ("lora", 2, _precision("int8", compute="fp16"), {"micro": 2, "accumulate": True}),
        ("unit_unused_on_rank_1", 2, _precision("int4", feedback=False), {}),
    ],
)
def test_stages_and_routes_are_identical_bits(
    name: str, world: int, precision: zerokit.Precision, options: dict[str, Any]
) -> None:
    run = Run(steps=3, precision=precision, clip=0.5, bucket_mb=SMALL, **options)
    # Stage 3 by each route, and each other stage by one of them by turns.
    runs = [
        {f"stage {stage}": replace(run, stage=stage) for stage in (3, (way + world) % 3)} for way in range(3)
    ]
    for ways in run_ranks(world, _by_every_route, name, runs):
        expected = ways[0]["stage 3"]
        for number, results in enumerate(ways):
            for label, result in results.items():
                assert_equal_bits(result, expected, f"way {number}, {label}")


UPDATES = {"compute": "bf16", "wire_updates": True}


def _clamp(model: torch.nn.Module) -> None:
    """By hand, without effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-100, 100)


def _replicas(given: tuple[Run, bool]) -> tuple[list[float], list[Tensor]]:
    run, clamped = given
    case, found = CASES["gpt"], Trajectory()
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(run.steps):
        if clamped:
            _clamp(model)
        one_step(model, optimizer, case, run, step, found)
    with torch.no_grad():
        float(case.loss(model, case.batch(0, 1, 0)))
    return found.losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_travel_as_differences_are_equal_on_every_rank(name: str) -> None:
    run = Run(stage=1, steps=4, precision=_precision(name, **UPDATES))
    # What was rounded away stays known where weights were changed by hand.
    cases = [(run, False), (replace(run, stage=2), False), (replace(run, stage=1 + (name == "int4")), True)]
    found = run_each(3, _replicas, cases)
    for (_, ours), *others in found:
        for _, theirs in others:
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert len({tuple(ranks[0][0]) for ranks in found}) == 1


def _overflowing(name: str) -> tuple[list[int], Trajectory]:
    """One step overflows at every stage; parameters leave gaps in the buckets."""
    case, skipped, found = CASES["gpt"], [], []
    for stage in STAGES:
        found.append(Trajectory())
        run = Run(stage=stage, steps=4, precision=_precision(name, compute="fp16"))
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run, loss_scale=zerokit.LossScale(value=64.0))
        for step in range(run.steps):
            if step == 2:
                optimizer.backward(case.loss(model, case.batch(0, 1, dist.get_rank())) * float("nan"))
                optimizer.step()
                optimizer.zero_grad()
            one_step(model, optimizer, case, run, step, found[-1])
        skipped.append(optimizer.skipped_steps)
    for other in found[1:]:
        assert_equal_bits(other, found[0], "stage")
    return skipped, found[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_overflows_is_the_only_one(name: str) -> None:
    for skipped, _ in run_ranks(2, _overflowing, name):
        assert skipped == [1] * len(STAGES)


def _returning() -> None:
    """Parameters that are not what masters round to come back in a state, and after an average was shown."""
    case, found = CASES["gpt"], list[list[float]]()
    run = Run(stage=2, precision=_precision("int4", **UPDATES))
    state: Any = None
    for _ in range(2):
        model = build_seeded(case, len(found))
        optimizer = wrap(model, case, run)
        average = zerokit.Ema(optimizer)
        if state is None:
            _train(optimizer, model, case, run, range(3))
            average.update()
            state = copy.deepcopy(optimizer.state_dict())
        else:
            optimizer.load_state_dict(state)
            with average.applied():
                pass
        found.append(_train(optimizer, model, case, run, range(3, 6)))
    assert found[0] == found[1]


def test_rounded_parameters_return_to_the_bit() -> None:
    run_ranks(2, _returning)


def _loaded_again() -> None:
    case, run = CASES["gpt"], Run(stage=2, precision=_precision("int8", **UPDATES))
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(one.shape, generator=generator) for name, one in model.state_dict().items()}
    found = []
    for step in range(2):
        model.load_state_dict(values)
        found.append([master.clone() for master in optimizer.state_dict()["masters"]])
        one_step(model, optimizer, case, run, step, Trajectory())
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_loaded_values_stay_exact_in_masters_where_rounded_updates_travel() -> None:
    run_ranks(2, _loaded_again)


def _each_account(name: str, micro: int) -> Iterator[tuple[Any, Any]]:
    case = CASES["gpt"]
    for stage in STAGES:
        options = UPDATES if stage in (1, 2) else {}
        run = Run(stage=stage, precision=_precision(name, **options), micro=micro)
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        for step in range(2):
            one_step(model, optimizer, case, run, step, Trajectory())
        predicted = optimizer.predicted_traffic(micro_batches=micro, reductions=micro)
        yield optimizer.traffic().by_operation, predicted.by_operation
        optimizer.backward(case.loss(model, case.batch(0, 1, dist.get_rank())))
        yield optimizer.memory(), optimizer.predicted_memory()


def _accounts(name: str, micro: int) -> list[tuple[Any, Any]]:
    return list(_each_account(name, micro))


@pytest.mark.parametrize(("name", "world", "micro"), [("int8", 2, 2), ("int4", 3, 1), ("int8", 1, 1)])
def test_bytes_equal_the_formulas(name: str, world: int, micro: int) -> None:
    for pairs in run_ranks(world, _accounts, name, micro):
        for measured, predicted in pairs:
            assert measured == predicted


def _on_a_mesh(run: Run) -> tuple[Trajectory, Any, Any]:
    case, found = CASES["gpt"], Trajectory()
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(run.steps):
        one_step(model, optimizer, case, run, step, found)
    traffic = optimizer.traffic().by_operation
    assert traffic == optimizer.predicted_traffic().by_operation
    inner, outer = traffic["reduce_scatter/inner"], traffic["reduce_scatter/outer"]
    assert inner.bytes == 4 * inner.elements
    assert 0.5 < outer.bytes / outer.elements < 1.2
    return found, optimizer.memory(), optimizer.predicted_memory()


def test_on_a_mesh_only_the_outer_axis_is_narrow() -> None:
    run = Run(steps=3, clip=0.5, mesh=(2, 2), precision=_precision("int8"))
    runs = [replace(run, stage=stage) for stage in ((0, 3), (2, 2), (1, 3))]
    updates = replace(run, stage=(2, 3), precision=_precision("int4", **UPDATES))
    *found, _ = run_each(4, _on_a_mesh, [*runs, updates])
    for case, results in zip(runs, found, strict=True):
        assert_equal_bits(results[0][0], found[0][0][0], str(case.stage))
        assert all(measured.residual == predicted.residual > 0 for _, measured, predicted in results)


# --- checkpoints -------------------------------------------------------------------------------------------


def _train(optimizer: Any, model: Any, case: Any, run: Run, steps: range) -> list[float]:
    found = Trajectory()
    for step in steps:
        one_step(model, optimizer, case, run, step, found)
    return found.losses


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
    case = CASES["gpt"]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    _train(optimizer, model, case, run, range(3))
    before = _residual_sum(optimizer)
    zerokit.save(path, optimizer, step=3)
    after = _residual_sum(optimizer)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    return _train(optimizer, model, case, run, range(3, 6)), after


def _resume(path: str, run: Run) -> tuple[list[float], list[Tensor]]:
    case = CASES["gpt"]
    model = build_seeded(case, 1)
    optimizer = wrap(model, case, run)
    zerokit.load(path, optimizer)
    sums = _residual_sum(optimizer)
    return _train(optimizer, model, case, run, range(3, 6)), sums


@pytest.mark.parametrize(
    ("stage", "precision", "world"),
    [(2, _precision("int8"), 3), (0, _precision("int4"), 1), (2, _precision("int4", **UPDATES), 3)],
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
        assert any(part.any() for part in sums)
        for one, other in zip(sums, found, strict=True):
            assert torch.equal(one, other)
    other_stage = replace(run, stage=3 if not precision.wire_updates else 1)
    for _, found in run_ranks(world, _resume, str(tmp_path), other_stage):
        for one, other in zip(went_on[0][1], found, strict=True):
            assert torch.equal(one, other)


def _load_elsewhere(path: str) -> str:
    case = CASES["gpt"]
    optimizer = wrap(build_seeded(case, 0), case, Run(stage=2))
    try:
        zerokit.load(path, optimizer)
    except zerokit.CheckpointError as error:
        return str(error)
    return ""


def test_a_residual_is_not_dropped_in_silence(tmp_path: Path) -> None:
    run_ranks(2, _save_and_go_on, str(tmp_path), Run(stage=2, precision=_precision("int8")))
    for text in run_ranks(2, _load_elsewhere, str(tmp_path)):
        assert "build ZeroOptimizer with Precision(wire='int8')" in text


# --- failures and refusals ---------------------------------------------------------------------------------


def _dies(switch: str) -> None:
    os.environ[SWITCH] = switch
    case, run = CASES["gpt"], Run(stage=2, precision=_precision("int8"))
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        one_step(model, optimizer, case, run, step, Trajectory())


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_killed_rank_is_named(switch: str) -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, switch, **AT_ONCE)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "rank 1" in waiting.error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wire": "int8", "reduce": "bf16"}, "cannot travel in int8"),
        ({"wire": "bf16", "compute": "bf16", "wire_updates": True}, "wire_updates=True sends"),
        ({"wire": "int8", "wire_updates": True}, "add wire='int8' and compute='bf16'"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(zerokit.UsageError, match=text):
        zerokit.Precision(**options)


def _stage_3_updates() -> str:
    case = CASES["gpt"]
    try:
        wrap(build_seeded(case, 0), case, Run(stage=3, precision=_precision("int8", **UPDATES)))
    except zerokit.UsageError as error:
        return str(error)
    return ""


def test_updates_have_no_differences_where_parameters_are_cut() -> None:
    assert all("choose stage 1 or 2" in text for text in run_ranks(2, _stage_3_updates))


def test_the_sizes_are_the_published_ones() -> None:
    assert BLOCK_FORMATS["int8"].nbytes(256) == 258
    assert BLOCK_FORMATS["int4"].nbytes(128) == 66
