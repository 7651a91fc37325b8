"""Every route sums the same terms in rank order, on every wire, and so trains to the same bits."""

from __future__ import annotations

import datetime
import math
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_ranks, run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from tests.support.oracle import train_alone
from tests.support.recording import plain_unit
from tests.support.streams import PromptStream, device_way
from tests.support.training import LARGE, SMALL, Run, Trajectory, require_memory_route, train_all, train_zero
from zerokit.formulas import Operation
from zerokit.layout import Cut, Interval, Parameter, Unit
from zerokit.placement import Mesh
from zerokit.runtime.collectives import Collectives, Kind, Parcels, Wire, Work, make_collectives
from zerokit.runtime.collectives.communicators import communicators_of
from zerokit.runtime.collectives.host import memory
from zerokit.runtime.collectives.host.node import SWITCH
from zerokit.runtime.collectives.nccl import make_nccl
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.shards import Shards
from zerokit.runtime.wires.blocks import QuantisedWire
from zerokit.runtime.wires.rounding import rounding_key
from zerokit.sizes import BLOCK_FORMATS


def _routes(wire: str) -> Iterator[Collectives]:
    """Each route that ranks of this machine have; the last is the device's, over gloo, which sums narrow terms."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    for switch in ("1", "0"):
        os.environ[SWITCH] = switch
        yield make_collectives(group, device, None, units=8)
    if wire == "bf16":
        line, reporter = Mesh(1, group.size()), StallReporter(group)
        three = communicators_of(group, line, device, None, reporter, backend="gloo")
        patience = datetime.timedelta(seconds=30)
        # It divides by the number of ranks, before gradients are rounded.
        yield make_nccl(three, line, device, reporter, patience, make_stream=PromptStream)


def _wire(name: str, dtype: torch.dtype, rank: int) -> Wire:
    """Rank 0 rounds blocks to the nearest, the others at random."""
    if name in BLOCK_FORMATS:
        return QuantisedWire(BLOCK_FORMATS[name], (lambda: rounding_key(rank)) if rank else None)
    return Wire(torch.bfloat16 if name == "bf16" else dtype)


def _buckets(numel: int, dtype: torch.dtype, *, alike: bool) -> list[Tensor]:
    """Every rank's bucket. Magnitudes are far apart, as few bits of about the same size add up exactly.

    They are so between elements or, where elements are rounded together, `alike` within a rank.
    """
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(numel)
    numbers = torch.randn(world, numel * world, generator=generator)
    exponents = torch.randint(-14, 15, numbers.shape, generator=generator)
    return list((numbers * 2.0 ** (12 * torch.arange(world)[:, None] if alike else exponents)).to(dtype))


def _in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _sums(name: str, dtype: torch.dtype) -> list[str]:
    """Every way of `reduce_scatter`, with pieces around the size of a chunk, against sums by hand."""
    memory._CHUNK_BYTES = 2048
    numels = [64, 512, 576, 1024, 3008] if name in BLOCK_FORMATS else [1, 64, 511, 512, 513, 3000]
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    wires = [_wire(name, dtype, peer) for peer in range(world)]
    for collectives in _routes(name):
        found.append(collectives.route)
        share = 1.0 / world if collectives.averages else 1.0
        for index, numel in enumerate(numels):
            unit, terms = plain_unit(index, numel * world, world), []
            buckets = _buckets(numel, dtype, alike=name in BLOCK_FORMATS)
            for form, given in zip(wires, buckets, strict=True):
                terms.append(torch.empty(numel, dtype=dtype))
                form.unpack(form.pack(given.view(world, -1), share)[rank], terms[-1], add=False)
            expected = _in_order(terms)
            for way in ("aside", "in place"):
                bucket, own = Shards(unit, buckets[rank].clone()), unit.shard(rank)
                aside = Shards(unit, torch.full((numel,), 0.5, dtype=dtype), own)
                out = bucket if way == "in place" else aside
                before = collectives.traffic.received_bytes
                wire = wires[rank] if name else None
                collectives.reduction(bucket, out, wire=wire).start().wait()
                assert torch.equal(out.at(own), expected), (numel, way)
                received = (world - 1) * wires[rank].packed_numel(numel) * wires[rank].dtype.itemsize
                assert collectives.traffic.received_bytes - before == received
            whole = Shards(unit, torch.zeros(numel * world, dtype=dtype))
            whole.at(own).copy_(buckets[0][own.start : own.stop])
            collectives.gather(whole).start().wait()
            assert torch.equal(whole.tensor, buckets[0])
            collectives.wait_for_readers()
    if world > 2 and dtype == torch.float32 and name != "int4":  # whose numbers have too few bits
        assert not torch.equal(expected, _in_order(terms[::-1])), "another order gives the same sum"
        assert not torch.equal(expected, _in_order([term.bfloat16() for term in terms])), (
            "as does one in bf16"
        )
    return found


@pytest.mark.parametrize(
    ("world", "name", "dtype"),
    [
        (2, "", torch.float32),
        (3, "", torch.bfloat16),
        (4, "", torch.float32),
        (2, "bf16", torch.float32),
        (4, "bf16", torch.float32),
        (3, "int8", torch.float32),
        (3, "int4", torch.float32),
    ],
)
def test_every_route_adds_terms_in_rank_order(world: int, name: str, dtype: torch.dtype) -> None:
    require_memory_route()
    for routes in run_ranks(world, _sums, name, dtype):
        assert routes == ["memory", "sockets", "nccl"][: len(routes)]


def _along_an_unequal_cut(bounds: tuple[int, ...], name: str) -> list[str]:
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    unit = Unit(0, (), (Parameter("p", (300,)),), Cut(bounds))
    own, buckets = unit.shard(rank), _buckets(100, torch.float32, alike=name in BLOCK_FORMATS)
    wires = [_wire(name, torch.float32, peer) for peer in range(world)]
    for collectives in _routes(name):
        found.append(collectives.route)
        share, terms = 1.0 / world if collectives.averages else 1.0, []
        for form, given in zip(wires, buckets, strict=True):
            terms.append(torch.empty(300))
            packed, sizes = form.pack_cut(Shards(unit, given), unit.cut, share)
            for piece, there in zip(
                packed.split(sizes), Shards(unit, terms[-1]).pieces(unit.cut), strict=True
            ):
                form.unpack(piece, there, add=False)
        expected, wire = _in_order(terms), wires[rank]
        bucket, out = Shards(unit, buckets[rank].clone()), Shards(unit, torch.zeros(own.numel), own)
        collectives.reduction(bucket, out, wire=wire if name else None).start().wait()
        assert torch.equal(out.tensor, expected[own.start : own.stop])
        received = (world - 1) * wire.packed_numel(own.numel) * wire.dtype.itemsize
        assert collectives.traffic.received_bytes == received
        whole = Shards(unit, torch.zeros(300))
        collectives.gather(whole, own=out).start().wait()
        assert torch.equal(whole.tensor, expected)
        assert collectives.traffic.received_bytes == received + 4 * (300 - own.numel)
        collectives.wait_for_readers()
    return found


@pytest.mark.parametrize("bounds", [(0, 10, 210, 300), (0, 0, 300, 300), (0, 150, 150, 300)])
@pytest.mark.parametrize("wire", ["", "bf16", "int8"])
def test_routes_move_elements_from_cut_to_cut(bounds: tuple[int, ...], wire: str) -> None:
    """Pieces of other sizes too, and empty ones."""
    require_memory_route()
    routes = ["memory", "sockets", *(["nccl"] if wire == "bf16" else [])]
    assert run_ranks(3, _along_an_unequal_cut, bounds, wire) == [routes] * 3


def _runs(turn: int, run: Run) -> list[dict[str, Run]]:
    """For each route stage 3 and two others by turns: in two turns every route has them all."""
    others = {f"stage {stage}": replace(run, stage=stage) for stage in range(3)}
    # Other buckets are cut into other blocks.
    blocks = getattr(run.precision, "wire", None) in BLOCK_FORMATS
    others["large"] = replace(run, stage=2, bucket_mb=SMALL if blocks else LARGE)
    labels = list(others)
    return [
        {label: others[label] for label in (labels[(turn + way) % 4], labels[(turn + way + 2) % 4])}
        | {"stage 3": replace(run, stage=3)}
        for way in range(3 if getattr(run.precision, "wire", None) else 2)
    ]


def _by_every_route(name: str, runs: list[dict[str, Run]]) -> list[dict[str, Trajectory]]:
    found = []
    for switch, mine in zip(("1", "0"), runs, strict=False):
        os.environ[SWITCH] = switch
        found.append(train_all(name, mine))
    with device_way(PromptStream):
        return found + [train_all(name, mine) for mine in runs[2:]]


@pytest.mark.full(default=["*-options[0236]", "*-options13"])
@pytest.mark.parametrize(
    ("turn", "name", "world", "precision", "options"),
    [
        (0, "gpt", 2, "fp32", {"micro": 2}),
        (1, "gpt", 3, "bf16", {"micro": 2}),
        (2, "tiny_parameters", 4, "fp16", {"micro": 2}),
        (3, "bert", 3, "fp32", {}),
        (0, "gpt_checkpoint_each", 2, zerokit.Precision(compute="bf16", reduce="bf16"), {}),
        (1, "lora", 3, zerokit.Precision(reduce="bf16"), {}),
        (0, "gpt", 2, zerokit.Precision(wire="bf16"), {}),
        (1, "gpt", 3, zerokit.Precision(wire="bf16"), {"micro": 2}),
        (2, "lora", 2, zerokit.Precision(wire="bf16", compute="bf16"), {"micro": 2, "accumulate": True}),
        (3, "unit_unused_on_rank_1", 2, zerokit.Precision(wire="bf16", compute="fp16"), {"micro": 2}),
        (0, "gpt", 2, zerokit.Precision(wire="int8"), {}),
        (1, "gpt", 3, zerokit.Precision(wire="int4", compute="bf16"), {"micro": 2}),
        (2, "lora", 2, zerokit.Precision(wire="int8", compute="fp16"), {"micro": 2, "accumulate": True}),
        (3, "unit_unused_on_rank_1", 2, zerokit.Precision(wire="int4"), {}),
    ],
)
def test_stages_buckets_and_routes_are_identical_bits(
    turn: int, name: str, world: int, precision: Any, options: dict[str, Any]
) -> None:
    """A rank that sums gradients in fp32 on its device's route may add in any order, so that route needs a wire."""
    require_memory_route()
    run = Run(steps=3, precision=precision, clip=0.5, bucket_mb=SMALL, **options)
    for ways in run_ranks(world, _by_every_route, name, _runs(turn, run)):
        for number, results in enumerate(ways):
            for label, result in results.items():
                assert_equal_bits(result, ways[0]["stage 3"], f"way {number}, {label}")


# --- the bf16 wire: gradients cross between ranks in bf16 and are summed in fp32 -----------------------------


BF16 = Wire(torch.bfloat16)
WIRE = zerokit.Precision(wire=torch.bfloat16)


@on_ranks(1)
def test_one_rank_rounds_nothing() -> None:
    alone = train_zero("gpt", Run(steps=3, precision=WIRE))
    assert alone.bits() == train_zero("gpt", Run(steps=3)).bits()
    os.environ[SWITCH] = "0"
    group = dist.group.WORLD
    assert group is not None
    collectives = make_collectives(group, torch.device("cpu"), None, units=1)
    bucket, unit = torch.randn(100), plain_unit(0, 100, 1)
    out = Shards(unit, torch.zeros(100))
    collectives.reduction(Shards(unit, bucket.clone()), out, wire=BF16).start().wait()
    assert torch.equal(out.tensor, bucket)


@pytest.mark.parametrize("name", ["gpt", "mlp_784_256_10"])
def test_it_equals_one_process_that_rounds_each_ranks_share(name: str) -> None:
    runs = {f"stage {stage}": Run(stage=stage, precision=WIRE, steps=4, clip=math.inf) for stage in (0, 3)}
    alone = run_alone(train_alone, name, replace(runs["stage 0"], precision="fp32"), 3, wire=torch.bfloat16)
    exact = run_alone(train_alone, name, replace(runs["stage 0"], precision="fp32"), 3)
    for rank, results in enumerate(run_ranks(3, train_all, name, runs)):
        for label, result in results.items():
            assert_equal_bits(result, alone[rank], f"rank {rank}, {label}")
            assert result.bits() != exact[rank].bits()


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
        ({"wire": "int8", "reduce": "bf16"}, "cannot travel in int8"),
        (
            {"wire": "int8", "compute": "bf16", "wire_updates": True},
            "updated parameters travel in the compute",
        ),
        ({"wire": "int8", "feedback": False}, "rounds gradients at random and keeps nothing"),
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
    plain = dict.fromkeys(("compute", "reduce", "master"), "float32")
    assert WIRE.as_dict() == plain | {"wire": "bfloat16"}


# --- exchanges of pieces from rank to rank ---------------------------------------------------------------


def _plan_of(turn: int, world: int) -> list[tuple[int, int, int, int]]:
    """Pieces that move, (from, to, start there, elements), in an order that all ranks have; some are empty.

    By turns all send to all, one rank to all others, and all to one; one rank neither sends nor receives.
    """
    generator = random.Random(turn)
    idle = world - 1 if turn % 4 == 3 else None
    ends = {0: (None, None), 1: (0, None), 2: (None, 1), 3: (None, None)}[turn % 4]
    moves = []
    for _ in range(generator.randrange(4 * world)):
        sender, receiver = (generator.randrange(world) if end is None else end for end in ends)
        if sender != receiver and idle not in (sender, receiver):
            start = generator.randrange(900)
            moves.append((sender, receiver, start, generator.choice([0, 1, 7, 64, 100])))
    return moves


def _memory_of(rank: int, turn: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(1000) + 1000 * rank + 17 * turn).remainder(251).to(dtype)


def _exchanged(dtype: torch.dtype) -> list[str]:
    """Exchanges of several units and kinds in flight at once, beside gathers and reductions."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for collectives in _routes("bf16"):
        found.append(collectives.route)
        received = collectives.traffic.received_bytes
        for round_ in range(3):
            flying = []
            for turn in range(4 * round_, 4 * round_ + 4):
                kind = (Kind.TO_OWNERS, Kind.FROM_OWNERS)[turn % 2]
                moves = _plan_of(turn, world)
                mine, memory = [m for m in moves if m[1] == rank], _memory_of(rank, turn, dtype)
                into = [torch.full((numel,), 3, dtype=dtype) for *_, numel in mine]
                parcels = Parcels(
                    memory,
                    [(to, Interval(at, at + numel)) for start, to, at, numel in moves if start == rank],
                    [(start, at, piece) for (start, _, at, _), piece in zip(mine, into, strict=True)],
                )
                numel = sum(m[3] for m in moves)
                arriving = dtype.itemsize * sum(m[3] for m in mine)
                count = collectives.counter("moved", kind, turn % 3, Operation(1, numel, 0), arriving)
                received += arriving
                between = collectives.between_all
                work = collectives.exchange(between, kind, turn % 3, parcels, [count])
                flying.append((work, turn, mine, into))
                unit = plain_unit(5 + turn % 2, 64 * world, world)
                whole = Shards(unit, torch.zeros(unit.numel))
                whole.at(unit.shard(rank)).fill_(rank + turn)
                gather = collectives.gather(whole).start()
                if not collectives.averages:  # which gloo cannot
                    bucket = Shards(unit, torch.full((unit.numel,), float(rank)))
                    out = Shards(unit, torch.zeros(64), unit.shard(rank))
                    collectives.reduction(bucket, out).start().wait()
                    assert (out.tensor == sum(range(world))).all()
                    received += (world - 1) * 64 * 4
                gather.wait()
                assert torch.equal(whole.tensor, (torch.arange(world) + turn).repeat_interleave(64).float())
                received += (world - 1) * 64 * 4
                # At most one of a kind and unit is in flight.
                for each in flying if turn % 3 == 2 else ():
                    _require_arrived(*each, dtype)
                if turn % 3 == 2:
                    flying.clear()
                    collectives.wait_for_readers()
            for each in flying:
                _require_arrived(*each, dtype)
            collectives.wait_for_readers()
        assert collectives.traffic.received_bytes == received
    return found


def _require_arrived(
    work: Work, turn: int, mine: list[tuple[int, int, int, int]], into: list[Tensor], dtype: torch.dtype
) -> None:
    work.wait()
    for (sender, _, start, numel), piece in zip(mine, into, strict=True):
        assert torch.equal(piece, _memory_of(sender, turn, dtype)[start : start + numel]), (turn, sender)


@pytest.mark.parametrize(
    ("world", "dtype"), [(1, torch.float32), (2, torch.float32), (3, torch.bfloat16), (4, torch.float16)]
)
def test_every_route_moves_pieces_from_rank_to_rank(world: int, dtype: torch.dtype) -> None:
    require_memory_route()
    for routes in run_ranks(world, _exchanged, dtype):
        assert routes == (["memory", "sockets", "nccl"] if world > 1 else ["sockets", "sockets", "nccl"])


def _without_one(switch: str, leaves: str) -> None:
    """Rank 1 does not come to the exchange: it ends, or does something else."""
    os.environ[SWITCH] = switch
    group = dist.group.WORLD
    assert group is not None
    collectives = make_collectives(group, torch.device("cpu"), datetime.timedelta(seconds=4), units=2)
    dist.barrier()
    if dist.get_rank() == 1:
        if leaves == "ends":
            os._exit(7)
        return  # and keeps its connections
    parcels = Parcels(torch.ones(8), [(1, Interval(0, 8))], [(1, 0, torch.zeros(8))])
    collectives.exchange(collectives.between_all, Kind.TO_OWNERS, 1, parcels, []).wait()


@pytest.mark.full(default=["ends-1", "does not come-0"])
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("leaves", ["ends", "does not come"])
def test_a_rank_that_does_not_come_to_an_exchange_is_named(switch: str, leaves: str) -> None:
    if switch == "1":
        require_memory_route()
    first = run_ranks_expecting_errors(2, _without_one, switch, leaves)[0]
    assert "ScheduleError" in first.error_types
    assert "rank 0 of 2 did not get through its to-owners of unit 1" in first.error
    assert "rank 1 failed, stopped, or is busy elsewhere" in first.error
    if (switch, leaves) == ("1", "ends"):
        assert re.search(r"rank 1 \(process \d+\) ended, or dropped the model", first.error)
