"""Whether settings name an engine and a model that exist, and ask of them what they can do."""

from __future__ import annotations

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError


def require_known(settings: Settings) -> Settings:
    """The same; raises `UsageError` for an unknown engine or model, and for sizes that the model cannot have."""
    if settings.engine not in ENGINES:
        raise UsageError(f"engine {settings.engine!r} is unknown: choose one of {tuple(ENGINES)}")
    describe(settings.model).check(
        seq_len=settings.seq_len,
        image_size=settings.image_size,
        batch_size=settings.batch_size,
        data=settings.data,
    )
    return settings


def unsupported(settings: Settings) -> str | None:
    """Why the engine cannot do this, in words; None where it can. Whether it is installed is not looked at."""
    stages = ENGINES[settings.engine].stages
    if settings.stage not in stages:
        has = f"stage {stages[0]} only" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        return f"{settings.engine} has no stage {settings.stage}: it has {has}"
    if settings.precision == "fp16" and settings.engine not in ("zerokit", "deepspeed", "compute-only"):
        return f"{settings.engine} is not benched in fp16, which needs its own loss scaling; use bf16"
    if settings.wire == "bf16" and settings.engine not in ("zerokit", "ddp"):
        return f"{settings.engine} has no bf16 wire: zerokit and ddp have"
    return None
