"""Made-up records: one with known numbers, and a sweep that looks like a real one."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, replace

from zerokit.bench.record.measured import (
    Bandwidth,
    Data,
    DeviceMemory,
    Environment,
    MemoryTimeline,
    Model,
    Phases,
    Rank,
    Samples,
    Traffic,
    Twin,
)
from zerokit.bench.record.record import Record, summarise, with_twin
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import Summary
from zerokit.bench.record.status import Status
from zerokit.formulas import MEMORY_KINDS

MIB = 2**20
CREATED = "2030-01-02T03:04:05+00:00"


def make_record(loss: list[float | None] | None = None) -> Record:
    """Two ranks, one warm-up step, three measured ones of 100, 200 and 300 ms on the slower rank."""
    settings = Settings(
        model="gpt-tiny", precision="fp32", device="cpu", nodes=2, steps=3, warmup=1, seq_len=16
    )
    losses: list[float | None] = loss or [5.5, 5.0, 4.0, 3.5]
    ranks = []
    for rank in range(2):
        state = {"parameters": 6 * MIB, "total": (8 + rank) * MIB}
        times, peak = [100.0 - 10 * rank, 200.0, 300.0], (300 + rank) * MIB
        one = Rank(rank, rank, "here", 100 + rank, "cpu", times, [900.0], 50.0, peak)
        ranks.append(replace(one, memory_bytes=state, predicted_memory_bytes=state))
    model = Model("gpt-tiny", 35_712, {"width": 32, "layers": 2}, "tokens", 16, None, None)
    software = "0.1.0", "2.13.0", "3.11.7", "Linux", "a processor"
    return Record(
        id="0" * 32,
        cell=settings.key,
        status=Status.OK,
        created=CREATED,
        settings=settings,
        model=model,
        data=Data("synthetic", 1000, 0, False, "abc"),
        environment=Environment(*software, 2, 2**34, 1, "gloo", 2, None, 0, None, None, {}, {}, None),
        ranks=ranks,
        traffic=Traffic(
            1000, 4 * MIB, 64, 1000, 4 * MIB, "(N−1)·2Ψ elements", {"all_gather": {"elements": 500}}
        ),
        loss=losses,
        gradient_norm=[2.0, 1.0, 0.5, 0.25],
        results=summarise(settings, model, ranks, losses),
    )


PSI = 33_674_240
SWEEP = "5" * 32


def make_timeline() -> MemoryTimeline:
    """Three readings of a step of two seconds."""
    sizes = dict(zip(MEMORY_KINDS, ([8, 8, 8], [0, 4, 4], [16, 16, 16], [1, 1, 1], [0, 20, 0]), strict=True))
    readings = {kind: [size * MIB for size in of_kind] for kind, of_kind in sizes.items()}
    parts = {"forward": [0.0], "backward": [0.5], "optimizer": [1.5]}
    return MemoryTimeline(parts, [0.0, 1.0, 2.0], readings)


_LATER = (
    "mesh",
    "outer_stage",
    "recompute",
    "every",
    "fragments",
    "delay",
    "target_loss",
    "optimizer",
    "states",
    "shares",
    "pace",
    "cores_per_rank",
    "memory_per_rank",
)
"""Settings that came later must not change what is drawn."""


def make_cell(
    engine: str = "zerokit",
    stage: int = 2,
    step_ms: float = 770.0,
    host_mib: int = 950,
    *,
    device: str = "cpu",
    twin: bool = True,
    nodes: int = 2,
    jitter: float = 0.03,
    **options: object,
) -> Record:
    """A cell that went well: 30 steps around `step_ms`, reproducible; `options` are further `Settings`."""
    settings = Settings(
        engine=engine,
        stage=stage,
        model="gpt-34m",
        nodes=nodes,
        warmup=11,
        **{"batch_size": 2, "precision": "fp32", "device": device, "bucket_mb": 25.0, **options},  # type: ignore[arg-type]
    )
    plain = {name: value for name, value in asdict(settings).items() if name not in _LATER}
    text = json.dumps(plain, sort_keys=True).encode()
    draw = random.Random(hashlib.blake2b(text, digest_size=8).hexdigest())
    flops = 6.0 * PSI + 12 * 8 * 512 * settings.seq_len
    sizes = {"layers": 8, "width": 512}
    model = Model("gpt-34m", PSI, sizes, "tokens", settings.seq_len, flops, "6N + 12·L·d·s a token")
    common = [step_ms * draw.lognormvariate(0.0, jitter) for _ in range(settings.steps)]
    common[settings.steps // 2] *= 1.4  # a machine is never quite alone
    kept = PSI * 4
    world = settings.world
    state = {
        "parameters": kept if stage < 3 else kept // world,
        "gradients": kept if stage < 2 else kept // world,
        "optimizer": 2 * kept if stage < 1 else 2 * kept // world,
        "buckets": 12 * MIB,
    }
    state["total"] = sum(state.values())
    own = engine == "zerokit"
    step_ms_of = [[ms * draw.uniform(0.985, 1.0) for ms in common] for _ in range(world)]
    warmup_ms = [step_ms * (3.0 if step == 0 else 1.1) for step in range(11)]
    ranks = []
    for rank, times in enumerate(step_ms_of):
        peak = (host_mib - 3 * rank) * MIB
        one = Rank(rank, rank % nodes, "laptop", 4000 + rank, "cpu", times, warmup_ms, 900.0, peak)
        counted = state if own else None
        ranks.append(replace(one, memory_bytes=counted, predicted_memory_bytes=counted))
    if device == "cuda":
        held = [(host_mib + more) * MIB for more in (-200, -100, -150, 400)]
        memory = DeviceMemory(held[2], held[1], 3 * MIB, held[3], 80 * 1024 * MIB)
        ranks = [
            replace(
                rank,
                device="NVIDIA H100 80GB HBM3",
                device_id=f"GPU-{rank.rank:04d}",
                peak_allocated_bytes=held[0],
                peak_reserved_bytes=held[1],
                device_memory=memory,
                window_ms=1.001 * sum(rank.step_ms),
            )
            for rank in ranks
        ]
    factor = 3 if stage == 3 else 2
    moved = factor * PSI * (world - 1)
    loss: list[float | None] = [5.6 * 0.985**step + draw.gauss(0, 0.01) for step in range(41)]
    record = replace(
        make_record(),
        id=f"{draw.getrandbits(128):032x}",
        sweep=SWEEP,
        cell=settings.key,
        settings=settings,
        model=model,
        ranks=ranks,
        traffic=Traffic(moved, 4 * moved, 2048, moved, 4 * moved, f"(N−1)·{factor}Ψ elements", {})
        if own
        else None,
        bandwidth=[
            Bandwidth(name, "zerokit" if own else "torch", kept, 24.0, 5.6, 5.6 * draw.uniform(0.5, 1.0))
            for name in ("reduce_scatter", "all_gather")
        ],
        phases=Phases(
            *(5, step_ms * 0.24, step_ms * 0.55, step_ms * 0.09, step_ms * 0.11 if own else None, "clock"),
            optimizer_share=0.09 / 0.88,
        ),
        system=[
            Samples(
                node,
                "laptop",
                1.0,
                [float(second) for second in range(23)],
                {"cpu_utilization_percentage": [min(100.0, 93 + draw.gauss(0, 4)) for _ in range(23)]},
                9.0,
            )
            for node in range(nodes)
        ],
        loss=loss,
        gradient_norm=[2.0 for _ in loss],
        results=summarise(settings, model, ranks, loss),
    )
    if not twin:
        return record
    floor = [605.0 * draw.lognormvariate(0.0, jitter) for _ in range(settings.steps)]
    pace = [0.9 * ms for ms in floor]
    return with_twin(record, Twin(0 if stage == 0 else 1, floor, Summary.of(floor), common, pace))


def paced(pace: float, step_ms: float = 700.0, *, repeat: int = 0, **options: object) -> Record:
    """A run on a machine of this pace: the steps of the cell and its twin's are `pace` times as long."""
    record = make_cell(step_ms=step_ms * pace, repeat=repeat, **options)  # type: ignore[arg-type]
    assert record.twin is not None
    twin = replace(record.twin, pace_ms=[500.0 * pace * (1 + 0.01 * repeat)] * len(record.twin.own_ms))
    return replace(record, twin=twin)


def make_failure(
    status: str, reason: str, engine: str = "zerokit", stage: int = 2, **options: object
) -> Record:
    """A cell of the same sweep that came to nothing."""
    settings = Settings(engine=engine, stage=stage, model="gpt-34m", nodes=2, **{"batch_size": 2, **options})  # type: ignore[arg-type]
    return Record(
        id=settings.key.rjust(32, "0"),
        cell=settings.key,
        status=Status(status),
        created=CREATED,
        settings=settings,
        reason=reason,
        sweep=SWEEP,
    )


def make_sweep(repeats: int = 1) -> list[Record]:
    """Engines and stages side by side, with cells that ran out of memory, failed, or could not run."""
    shapes = [
        ("zerokit", 0, 742.0, 1168),
        ("zerokit", 1, 768.0, 951),
        ("zerokit", 2, 769.0, 975),
        ("zerokit", 3, 904.0, 810),
        ("ddp", 0, 721.0, 1174),
        ("zero-redundancy-optimizer", 1, 725.0, 1036),
        ("fsdp2", 3, 1270.0, 1223),
        ("parameter-server", 0, 1010.0, 1390),
    ]
    cells = [
        make_cell(engine, stage, step_ms * (1 + 0.01 * repeat), host_mib + 2 * repeat, repeat=repeat)
        for repeat in range(repeats)
        for engine, stage, step_ms, host_mib in shapes
    ]
    return [
        *cells,
        make_failure("unsupported", "deepspeed is not installed here; pip install deepspeed", "deepspeed"),
        make_failure("out of memory", "needs about 41.2 GiB a rank, 7.5 GiB are available", "deepspeed", 1),
        make_failure("failed", "rank 1: ValueError: not today", "fsdp2", 2),
    ]
