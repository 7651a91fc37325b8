"""The bf16 wire: gradients cross between ranks in bf16 and are summed in fp32, in rank order."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.oracle import train_alone
from tests.support.recording import plain_unit
from tests.support.training import LARGE, Run, train_all, train_zero
from zerokit.runtime.collectives import Wire, make_collectives
from zerokit.runtime.collectives.node import SWITCH

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
    bucket, out = torch.randn(100), torch.zeros(100)
    collectives.reduce_scatter(plain_unit(0, 100, 1), bucket.clone(), out, add=False, wire=BF16).wait()
    assert torch.equal(out, bucket)


# --- training ----------------------------------------------------------------------------------------------


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
        ({"wire": "int8", "reduce": "bf16"}, "cannot travel in int8"),
        ({"wire": "bf16", "compute": "bf16", "wire_updates": True}, "wire_updates=True sends"),
        ({"wire": "int8", "wire_updates": True}, "add wire='int8' and compute='bf16'"),
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
    plain = dict.fromkeys(("compute", "reduce", "master"), "float32")
    assert WIRE.as_dict() == plain | {"wire": "bfloat16"}
