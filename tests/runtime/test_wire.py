"""The bf16 wire: gradients cross between ranks in bf16 and are summed in fp32, in rank order, by every route."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES, count
from tests.support.oracle import train_alone
from tests.support.recording import plain_unit
from tests.support.streams import PromptStream, device_way
from tests.support.training import (
    LARGE,
    Run,
    Trajectory,
    build_seeded,
    draw,
    one_step,
    train_all,
    train_zero,
    wrap,
)
from zerokit.bench.engines.ddp import compress_in_bf16
from zerokit.placement import Mesh
from zerokit.runtime.collectives import Collectives, Wire, make_collectives
from zerokit.runtime.collectives.memory import MemoryRoute
from zerokit.runtime.collectives.nccl import communicators_of, make_nccl
from zerokit.runtime.collectives.node import SWITCH
from zerokit.runtime.collectives.stalls import StallReporter

STAGES = (0, 1, 2, 3)
BF16 = Wire(torch.bfloat16)
WIRE = zerokit.Precision(wire=torch.bfloat16)
HALF = zerokit.Precision(compute=torch.bfloat16, wire=torch.bfloat16)
SCALED = zerokit.Precision(compute=torch.float16, wire=torch.bfloat16)

Floats = npt.NDArray[np.float32]

# --- the sum, against one written without torch ------------------------------------------------------------


def rounded(numbers: Floats) -> Floats:
    """To bf16, to nearest and ties to even: fp32 whose lower 16 bits are zero. Numbers are finite."""
    bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
    bits += np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def in_order(pieces: list[Floats]) -> Floats:
    """The sum in fp32, from the first to the last."""
    total = pieces[0].copy()
    for piece in pieces[1:]:
        total = (total + piece).astype(np.float32)
    return total


def reference(pieces: list[Floats]) -> Floats:
    return in_order([rounded(piece) for piece in pieces])


class _Shelf:
    """What other ranks offer, without other ranks: under each number their whole buckets."""

    def __init__(self, buckets: list[Tensor]) -> None:
        self._buckets = buckets

    def read(self, peer: int, address: int, into: Tensor) -> None:
        assert into.dtype == self._buckets[peer].dtype
        start = address // into.element_size()
        into.copy_(self._buckets[peer][start : start + into.numel()])


def _host_route(rank: int, world: int, buckets: list[Tensor]) -> MemoryRoute:
    """Only what `_sum` needs of it."""
    route = MemoryRoute.__new__(MemoryRoute)
    route.rank, route.size = rank, world
    route.neighbours = _Shelf(buckets)  # type: ignore[assignment]
    return route


_NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.data())
def test_the_host_route_sums_rounded_pieces_in_fp32_and_in_rank_order(data: st.DataObject) -> None:
    world, piece = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 9))
    rank = data.draw(st.integers(0, world - 1))
    lists = [data.draw(st.lists(_NUMBERS, min_size=piece, max_size=piece)) for _ in range(world)]
    pieces = [np.array(numbers, dtype=np.float32) for numbers in lists]
    buckets = [torch.zeros(world * piece, dtype=torch.bfloat16) for _ in range(world)]
    for bucket, numbers in zip(buckets, pieces, strict=True):
        bucket.view(world, piece)[rank] = torch.from_numpy(rounded(numbers))
    for add in (False, True):
        out = torch.ones(piece)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerokit.runtime.collectives.memory._CHUNK_BYTES", 16)
            own = buckets[rank].view(world, piece)[rank]
            addresses = dict.fromkeys(range(world), 0)
            _host_route(rank, world, buckets)._sum(own, out, addresses, BF16, add=add)
        expected = reference(pieces)
        assert np.array_equal(out.numpy(), expected + np.float32(1) if add else expected)


# --- every route, between real ranks -----------------------------------------------------------------------


def _routes() -> Iterator[Collectives]:
    """Each route that two or more ranks of this machine have; the last is the device's, over gloo."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    for switch in ("1", "0"):
        os.environ[SWITCH] = switch
        yield make_collectives(group, device, None, units=1)
    line = Mesh(1, group.size())
    reporter = StallReporter(group)
    three = communicators_of(group, line, device, None, reporter, backend="gloo")
    patience = datetime.timedelta(seconds=30)
    # It divides by the number of ranks, before gradients are rounded.
    yield make_nccl(three, line, device, reporter, patience, make_stream=PromptStream)


def _pieces(numel: int) -> Tensor:
    """[rank × world × numel]: what every rank has for every rank.

    Magnitudes are far apart: numbers of 8 bits of about the same size have an exact sum in fp32, in any order.
    """
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(numel)
    pieces = torch.randn(world, world, numel, generator=generator)
    return pieces * 2.0 ** torch.randint(-14, 15, pieces.shape, generator=generator)


def _reduce_by_every_route(numels: list[int]) -> list[str]:
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    all_pieces = [_pieces(numel) for numel in numels]
    for collectives in _routes():
        found.append(collectives.route)
        share = 1.0 / world if collectives.averages else 1.0
        references = [reference([(piece[rank] * share).numpy() for piece in pieces]) for pieces in all_pieces]
        for numel, pieces, wanted_pieces in zip(numels, all_pieces, references, strict=True):
            expected = torch.from_numpy(wanted_pieces)
            for way in ("aside", "in place", "add"):
                bucket = pieces[rank].clone().flatten()
                out = bucket.view(world, -1)[rank] if way == "in place" else torch.full((numel,), 0.5)
                before = collectives.counters.received_bytes
                unit = plain_unit(0, numel * world, world)
                collectives.reduce_scatter(unit, bucket, out, add=way == "add", wire=BF16).wait()
                wanted = expected + 0.5 if way == "add" else expected
                assert torch.equal(out, wanted), f"{collectives.route}, {numel} elements, {way}"
                assert collectives.counters.received_bytes - before == 2 * (world - 1) * numel
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_route_sums_rounded_pieces_in_fp32_and_in_rank_order(world: int) -> None:
    for routes in run_ranks(world, _reduce_by_every_route, [1, 64, 1000, 300_000]):
        assert routes[1:] == ["sockets", "nccl"]


def _alternatives() -> dict[str, Floats]:
    pieces = [piece[dist.get_rank()].numpy() for piece in _pieces(1000)]
    exact = [rounded(piece) for piece in pieces]
    half = exact[0]
    for piece in exact[1:]:
        half = rounded(half + piece)
    own = dist.get_rank()
    return {
        "reference": reference(pieces),
        "in bf16": half,
        "backwards": in_order(exact[::-1]),
        "own first": in_order([exact[own], *exact[:own], *exact[own + 1 :]]),
        "own not rounded": in_order([*exact[:own], pieces[own], *exact[own + 1 :]]),
        "none rounded": in_order(pieces),
        "in fp64": np.sum(np.array(exact, dtype=np.float64), axis=0).astype(np.float32),
    }


def test_these_numbers_tell_other_sums_apart() -> None:
    """What the tests above compare with is not what a slightly wrong sum would give as well."""
    found = run_ranks(4, _alternatives)
    for name in found[0]:
        differs = any(not np.array_equal(sums[name], sums["reference"]) for sums in found)
        assert differs == (name != "reference"), name


def _one_rank() -> None:
    alone = train_zero("gpt", Run(steps=3, precision=WIRE))
    assert alone.bits() == train_zero("gpt", Run(steps=3)).bits()
    os.environ[SWITCH] = "0"
    group = dist.group.WORLD
    assert group is not None
    collectives = make_collectives(group, torch.device("cpu"), None, units=1)
    bucket, out = _pieces(100).flatten(), torch.zeros(100)
    collectives.reduce_scatter(plain_unit(0, 100, 1), bucket.clone(), out, add=False, wire=BF16).wait()
    assert torch.equal(out, bucket)


def test_one_rank_rounds_nothing() -> None:
    run_ranks(1, _one_rank)


# --- training ----------------------------------------------------------------------------------------------


def _runs(turn: int, precision: Any, **options: Any) -> list[dict[str, Run]]:
    """For each route stage 3 and two of the others by turns: in two turns every route has them all."""
    run = Run(steps=3, precision=precision, clip=0.5, **options)
    others = {f"stage {stage}": replace(run, stage=stage) for stage in STAGES[:3]}
    others["large"] = replace(run, stage=2, bucket_mb=LARGE)
    labels = list(others)
    return [
        {label: others[label] for label in (labels[(turn + way) % 4], labels[(turn + way + 2) % 4])}
        | {"stage 3": replace(run, stage=3)}
        for way in range(3)
    ]


def _by_every_way(name: str, runs: list[dict[str, Run]]) -> list[dict[str, Trajectory]]:
    found = []
    for switch, mine in zip(("1", "0"), runs, strict=False):
        os.environ[SWITCH] = switch
        found.append(train_all(name, mine))
    with device_way(PromptStream):
        return [*found, train_all(name, runs[2])]


@pytest.mark.parametrize(
    ("turn", "name", "world", "precision", "options"),
    [
        (0, "gpt", 2, WIRE, {}),
        (1, "gpt", 3, WIRE, {"micro": 2}),
        (2, "lora", 2, HALF, {"micro": 2, "accumulate": True}),
        (3, "unit_unused_on_rank_1", 2, SCALED, {"micro": 2}),
    ],
)
def test_stages_buckets_and_routes_are_identical_bits(
    turn: int, name: str, world: int, precision: Any, options: dict[str, Any]
) -> None:
    for ways in run_ranks(world, _by_every_way, name, _runs(turn, precision, **options)):
        expected = ways[0]["stage 3"]
        for number, results in enumerate(ways):
            for label, result in results.items():
                assert_equal_bits(result, expected, f"way {number}, {label}")


@pytest.mark.parametrize("name", ["gpt", "mlp_784_256_10"])
def test_it_equals_one_process_that_rounds_each_ranks_share(name: str) -> None:
    runs = {f"stage {stage}": Run(stage=stage, precision=WIRE, steps=4, clip=math.inf) for stage in (0, 3)}
    alone = run_alone(train_alone, name, replace(runs["stage 0"], precision="fp32"), 3, wire=torch.bfloat16)
    exact = run_alone(train_alone, name, replace(runs["stage 0"], precision="fp32"), 3)
    for rank, results in enumerate(run_ranks(3, train_all, name, runs)):
        for label, result in results.items():
            assert_equal_bits(result, alone[rank], f"rank {rank}, {label}")
            assert result.bits() != exact[rank].bits()


def test_losses_follow_those_of_an_fp32_wire_and_end_within_the_spread_of_three_seeds() -> None:
    runs = {f"seed {seed}": Run(steps=40, bucket_mb=LARGE, clip=1.0, seed=seed) for seed in range(3)}
    runs["wire"] = replace(runs["seed 0"], precision=WIRE)
    for results in run_ranks(2, train_all, "gpt", runs):
        wire, exact = results["wire"].losses, results["seed 0"].losses
        assert wire == pytest.approx(exact, rel=2e-3)
        assert wire != exact
        last = {label: statistics.mean(result.losses[-20:]) for label, result in results.items()}
        mean = last.pop("wire")
        assert abs(mean - last["seed 0"]) <= statistics.stdev(last.values())


def _errors(name: str) -> dict[str, float]:
    """How far each way's mean gradient is from that in fp64, as a share of it."""
    case, run, rank = CASES[name], Run(optimizer="sgd"), dist.get_rank()
    plain = build_seeded(case, 0)
    case.loss(plain, draw(case, run, 0, 0, rank)).backward()
    exact = torch.cat([p.grad.double().flatten() for p in plain.parameters() if p.grad is not None])
    dist.all_reduce(exact)
    exact /= dist.get_world_size()

    def error(gradients: list[Tensor]) -> float:
        flat = torch.cat([gradient.double().flatten() for gradient in gradients])
        return float((flat - exact).norm() / exact.norm())

    found = {}
    for label, precision in (("fp32", "fp32"), ("wire", WIRE)):
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, replace(run, precision=precision))
        optimizer.backward(case.loss(model, draw(case, run, 0, 0, rank)))
        with optimizer.gathered_gradients():
            found[label] = error([p.grad for p in model.parameters() if p.grad is not None])
    engine = DistributedDataParallel(build_seeded(case, 0))
    engine.register_comm_hook(None, compress_in_bf16)
    case.loss(engine, draw(case, run, 0, 0, rank)).backward()
    found["DDP's hook"] = error([p.grad for p in engine.parameters() if p.grad is not None])
    return found


def test_gradients_are_nearer_to_exact_ones_than_those_of_ddps_bf16_hook() -> None:
    for errors in run_ranks(4, _errors, "mlp_784_256_10"):
        assert errors["fp32"] < 1e-6
        assert errors["wire"] < 2.0**-8  # one rounding of each term
        assert errors["wire"] < 0.8 * errors["DDP's hook"]


# --- bytes -------------------------------------------------------------------------------------------------


def _traffic(micro: int) -> list[dict[str, Any]]:
    case, found = CASES["gpt"], []
    for stage in STAGES:
        run = Run(stage=stage, precision=WIRE, micro=micro)
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        for step in range(2):
            one_step(model, optimizer, case, run, step, Trajectory())
        predicted = optimizer.predicted_traffic(micro_batches=micro, reductions=micro)
        found.append({"measured": optimizer.traffic().by_operation, "predicted": predicted.by_operation})
    return found


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (2, 2), (3, 1)])
def test_traffic_equals_the_formula(world: int, micro: int) -> None:
    """Half the bytes of reductions, as many elements; gathers stay in fp32, stage 0's of sums too."""
    psi = count(CASES["gpt"].build())
    for stages in run_ranks(world, _traffic, micro):
        for found in stages:
            assert found["measured"] == found["predicted"]
            moved = found["measured"]
            assert moved["reduce_scatter"].elements == micro * (world - 1) * psi
            assert moved["reduce_scatter"].bytes == 2 * micro * (world - 1) * psi
            assert moved["all_gather"].bytes == 4 * moved["all_gather"].elements


# --- what there is not -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wire": torch.float16}, "choose wire=torch.bfloat16 with reduce=torch.float32"),
        ({"wire": torch.float32, "reduce": torch.bfloat16}, "cannot travel in torch.float32"),
        ({"wire": "bf16", "reduce": "fp16"}, "cannot travel in torch.bfloat16"),
        ({"wire": torch.int8}, "wire=torch.int8 is not one of"),
        ({"wire": torch.float64}, "wire=torch.float64 is not one of"),
        ({"wire": "fp8"}, "wire='fp8' is not one of"),
        ({"wire": False}, "wire=False is not one of"),
    ],
)
def test_wires_that_do_not_exist_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(zerokit.UsageError, match=text):
        zerokit.Precision(**options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_dtype_of_reduction_is_no_wire_of_its_own(dtype: Any) -> None:
    same = zerokit.Precision(reduce=dtype, wire=dtype)
    assert same == zerokit.Precision(reduce=dtype)
    assert "wire" not in same.as_dict()


def test_a_precision_says_its_wire() -> None:
    assert zerokit.Precision(wire="bf16") == WIRE
    assert WIRE.as_dict() == {
        "compute": "float32",
        "reduce": "float32",
        "master": "float32",
        "wire": "bfloat16",
    }


def _disagree() -> str:
    precision = WIRE if dist.get_rank() else zerokit.Precision()
    try:
        zerokit.ZeroOptimizer(nn.Linear(4, 4), torch.optim.SGD, precision=precision, lr=0.1)
    except zerokit.LayoutMismatch as error:
        return str(error)
    return ""


def test_ranks_that_disagree_about_the_wire_are_told() -> None:
    assert all("precision" in text and "wire" in text for text in run_ranks(2, _disagree))
