"""A made-up record with known numbers."""

from __future__ import annotations

from dataclasses import asdict

from zerokit.bench.models import MODELS
from zerokit.bench.record import Data, Environment, Model, Rank, Record, Traffic, summarise
from zerokit.bench.settings import Settings

MIB = 2**20


def make_record(loss: list[float | None] | None = None) -> Record:
    """Two ranks, one warm-up step, three measured ones of 100, 200 and 300 ms on the slower rank."""
    settings = Settings(
        model="gpt-tiny", precision="fp32", device="cpu", nodes=2, steps=3, warmup=1, seq_len=16
    )
    losses: list[float | None] = loss or [5.5, 5.0, 4.0, 3.5]
    ranks = [
        Rank(
            rank=rank,
            node=rank,
            host="here",
            pid=100 + rank,
            device="cpu",
            step_ms=[100.0 - 10 * rank, 200.0, 300.0],
            warmup_ms=[900.0],
            build_ms=50.0,
            peak_host_bytes=(300 + rank) * MIB,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            memory_bytes={"parameters": 6 * MIB, "total": (8 + rank) * MIB},
            predicted_memory_bytes={"parameters": 6 * MIB, "total": (8 + rank) * MIB},
        )
        for rank in range(2)
    ]
    model = Model(
        "gpt-tiny", MODELS["gpt-tiny"].parameters, asdict(MODELS["gpt-tiny"]), "tokens", 16, None, None
    )
    return Record(
        id="0" * 32,
        cell=settings.key,
        status="ok",
        created="2030-01-02T03:04:05+00:00",
        settings=settings,
        model=model,
        data=Data("synthetic", 1000, 0, False, "abc"),
        environment=Environment(
            zerokit="0.1.0",
            torch="2.13.0",
            python="3.11.7",
            platform="Linux",
            processor="a processor",
            cores=2,
            memory_bytes=2**34,
            threads=1,
            backend="gloo",
            world=2,
            accelerator=None,
            accelerators=0,
            cuda=None,
            nccl=None,
            packages={},
            variables={},
            git_commit=None,
        ),
        ranks=ranks,
        traffic=Traffic(
            1000, 4 * MIB, 64, 1000, 4 * MIB, "(N−1)·2Ψ elements", {"all_gather": {"elements": 500}}
        ),
        loss=losses,
        gradient_norm=[2.0, 1.0, 0.5, 0.25],
        skipped_steps=0,
        results=summarise(settings, model, ranks, losses),
    )
