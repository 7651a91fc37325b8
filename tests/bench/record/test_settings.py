"""Settings that make no sense are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from zerokit.bench.catalogue.engines import require_known, unsupported
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "gpt-9"}, "model 'gpt-9' is unknown: did you mean gpt"),
        ({"engine": "horovod"}, "engine 'horovod' is unknown"),
        ({"stage": 4}, "stage 4 is unknown"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown"),
        ({"wire": "fp16"}, "wire 'fp16' is unknown"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"nodes": 0}, "nodes must be at least 1, not 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"seq_len": 257}, "seq_len 257 exceeds the 256 positions of gpt-5m"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_known(Settings(**wrong))


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
    ],
)
def test_what_an_engine_cannot_do_is_said(asked: dict[str, Any], reason: str | None) -> None:
    found = unsupported(Settings(**asked))
    assert found is None if reason is None else found is not None and found.startswith(reason)
