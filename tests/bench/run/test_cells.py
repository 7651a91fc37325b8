"""The cells of a sweep: which, in which order, and what they are called."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from zerokit.bench.catalogue.engines import label_of, require_known, unsupported
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import slug, varying
from zerokit.bench.run.sweep import product
from zerokit.errors import UsageError

TINY = {"model": "gpt-tiny", "seq_len": 16}


def test_engines_and_stages_of_one_workload_follow_each_other() -> None:
    cells = product({"batch_size": (1, 4), "engine": ("zerokit", "fsdp2"), "stage": (2, 3)}, TINY)
    assert [(cell.batch_size, cell.engine, cell.stage) for cell in cells] == [
        (batch, engine, stage) for batch in (1, 4) for engine in ("zerokit", "fsdp2") for stage in (2, 3)
    ]


def test_without_a_stage_an_engine_has_its_own() -> None:
    cells = product({"engine": ("ddp", "fsdp2", "zerokit", "zero-redundancy-optimizer")}, TINY)
    assert [cell.stage for cell in cells] == [0, 3, 2, 1]
    assert product({}, TINY) == [Settings(model="gpt-tiny", seq_len=16)]


def test_ranks_of_a_node_are_its_share_of_the_devices_and_at_least_one() -> None:
    def ranks(devices: int, **options: tuple[int, ...]) -> list[tuple[int, int]]:
        cells = product(options, TINY, devices=devices)
        return [(cell.nodes, cell.nproc_per_node) for cell in cells]

    assert ranks(0, nodes=(1, 2)) == [(1, 1), (2, 1)]
    assert ranks(8, nodes=(1, 2, 16)) == [(1, 8), (2, 4), (16, 1)]
    assert ranks(8) == [(1, 8)]
    assert ranks(8, nproc_per_node=(2,), nodes=(2,)) == [(2, 2)]


def test_sequences_are_no_longer_than_a_model_has_positions() -> None:
    cells = product({"model": ["gpt-tiny", "gpt-5m", "resnet50"]}, {})
    assert [cell.seq_len for cell in cells] == [64, 128, 128]
    assert product({"model": ["gpt-tiny"], "seq_len": [32]}, {})[0].seq_len == 32


def test_every_second_round_goes_backwards() -> None:
    cells = product({"stage": (0, 1, 2)}, TINY, repeats=3)
    assert [(cell.repeat, cell.stage) for cell in cells] == [
        *((0, stage) for stage in (0, 1, 2)),
        *((1, stage) for stage in (2, 1, 0)),
        *((2, stage) for stage in (0, 1, 2)),
    ]
    assert len({cell.key for cell in cells}) == 9


def test_a_label_tells_what_varies() -> None:
    cells = product({"batch_size": (1, 2), "bucket_mb": (0.5, 25.0), "stage": (3,)}, TINY, repeats=2)
    dimensions = varying(cells)
    assert dimensions == ["batch_size", "bucket_mb"]
    assert label_of(cells[0], dimensions) == ["zerokit 3", "batch 1", "bucket 0.5 MiB"]
    assert label_of(cells[-1], dimensions, rounds=True)[0] == "zerokit 3 #2"
    wires = product({"engine": ("zerokit", "ddp"), "wire": ("own", "bf16")}, TINY)
    assert label_of(wires[1], varying(wires)) == ["zerokit 2", "bf16 wire"]
    assert label_of(Settings(engine="ddp", stage=0), ("precision",)) == ["DDP"]
    homes = product({"states": ("device", "./nvme", "fp8"), "stage": (3,)}, TINY)
    assert [label_of(cell, varying(homes))[1] for cell in homes] == [
        *("states device", "states ./nvme", "states fp8"),
    ]
    both = product({"engine": ("ddp", "fsdp2"), "optimizer": ("adamw", "muon")}, TINY)
    assert [" ".join(label_of(cell, varying(both))) for cell in both] == [
        *("DDP adamw", "DDP muon", "FSDP2 3 adamw", "FSDP2 3 muon"),
    ]


def test_a_slug_is_fit_for_a_file_name() -> None:
    assert slug("fsdp2 stage 3, my.package:factory/../x") == "fsdp2-stage-3-my.package-factory-..-x"
    assert slug("../..") == ""
    assert slug("/etc/passwd") == "etc-passwd"


def test_what_cannot_run_is_recorded_in_the_first_round_only() -> None:
    cells = product({"engine": ("zerokit", "ddp"), "stage": (1,)}, {}, 3)
    found = [(cell.engine, cell.repeat) for cell in cells]
    assert found == [("zerokit", 0), ("ddp", 0), ("zerokit", 1), ("zerokit", 2)]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", float("nan"), "lr: expected at most 1e.100, found nan"),
        ("clip", float("inf"), "clip: expected at most 1e.100, found inf"),
        ("seed", 2**64, "seed: expected at most 9.2"),
    ],
)
def test_numbers_that_no_record_holds_are_refused(option: str, value: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        product({}, {**TINY, option: value})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "horovod"}, "engine 'horovod' is unknown"),
        ({"stage": 4}, "stage 4 is unknown"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown"),
        ({"wire": "fp16"}, "wire 'fp16' is unknown"),
        ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown: choose one of ('adamw', 'muon')"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"nodes": 0}, "nodes must be at least 1, not 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"mesh": "2x3"}, "has 6 ranks, and there are 4"),
        ({"mesh": "4x1"}, "neither axis 1"),
        ({"mesh": "2,2"}, "expected OUTERxINNER"),
        ({"outer_stage": 1}, "give --mesh"),
        ({"mesh": "2x2", "outer_stage": 3}, "it lies between 0 and the inner one"),
        ({"mesh": "2x2", "elastic": True, "save": "run"}, "leave --mesh out"),
        ({"fragments": 2}, "give --every too"),
        ({"every": 4, "delay": 4}, "must be under"),
        ({"every": 4, "nproc_per_node": 1}, "needs islands"),
        ({"every": 4, "mesh": "2x2", "outer_stage": 0}, "omit --outer-stage"),
        ({"every": 4, "mesh": "1x4"}, "neither axis 1"),
        (
            {"states": "disc"},
            "expected device, host, fp8, or the path of a directory with a slash, such as ./disc",
        ),
        ({"states": ""}, "states is empty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        require_known(Settings(**({"nproc_per_node": 4} | options)))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"engine": "ddp", "stage": 3}, "ddp has no stage 3: it has stage 0 only"),
        ({"engine": "fsdp2", "stage": 0}, "fsdp2 has no stage 0: it has stages 2, 3"),
        ({"engine": "fsdp2", "stage": 3, "precision": "fp16"}, "fsdp2 is not benched in fp16"),
        ({"engine": "fsdp2", "stage": 3, "wire": "bf16"}, "fsdp2 has no bf16 wire: zerokit and ddp have"),
        ({"engine": "ddp", "stage": 0, "wire": "bf16"}, None),
        ({"engine": "zerokit", "stage": 3, "precision": "fp16", "wire": "bf16"}, None),
        ({"engine": "zerokit", "stage": 0}, None),
        ({"engine": "fsdp2", "stage": 3, "optimizer": "muon"}, None),
        ({"engine": "fsdp2", "stage": 3, "states": "host"}, "--states host is zerokit's"),
        ({"engine": "zerokit", "stage": 3, "states": "/nvme"}, None),
        ({"engine": "deepspeed", "optimizer": "muon"}, "deepspeed is benched with adamw only: zerokit, ddp"),
        ({"engine": "parameter-server", "stage": 0, "optimizer": "muon"}, "is benched with adamw only"),
        ({"model": "resnet50", "optimizer": "muon"}, "resnet50 has no matrices in blocks"),
        ({"model": "mine:net", "optimizer": "muon"}, None),
        ({"every": 8, "optimizer": "muon"}, "zerokit's local steps mix shards"),
        ({"every": 8, "optimizer": "muon", "engine": "post-local-sgd", "stage": 0}, None),
        ({"mesh": "2x2", "stage": 3, "outer_stage": 1}, None),
        ({"mesh": "2x2", "stage": 3, "outer_stage": 1, "engine": "fsdp2"}, "its outer stage is 0"),
        ({"mesh": "2x2", "stage": 3, "outer_stage": 0, "engine": "fsdp2"}, None),
        ({"mesh": "2x2", "stage": 0, "engine": "ddp"}, "has one axis"),
        ({"every": 8, "fragments": 2, "delay": 4}, None),
        ({"every": 8, "engine": "post-local-sgd", "stage": 0}, None),
        ({"every": 8, "engine": "post-local-sgd", "stage": 0, "fragments": 2}, "without --fragments"),
        ({"engine": "post-local-sgd", "stage": 0}, "post-local-sgd averages"),
        ({"every": 8, "engine": "ddp", "stage": 0}, "zerokit and post-local-sgd"),
    ],
)
def test_what_an_engine_cannot_do_is_said(asked: dict[str, Any], reason: str | None) -> None:
    found = unsupported(Settings(nproc_per_node=4, **asked))
    assert found is None if reason is None else found is not None and reason in found


def test_ranks_form_axes_and_islands() -> None:
    square = Settings(nproc_per_node=4, mesh="2x2", stage=3, outer_stage=1)
    assert (square.shape, square.stages) == ((2, 2), (1, 3))
    local = Settings(nproc_per_node=4, every=8)
    assert [replace(local, mesh=mesh).islands for mesh in (None, "2x2", "4x1")] == [(4, 1), (2, 2), (4, 1)]
