"""Every workload has the size that its paper or its makers publish; what cannot fit is refused, and nothing else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from zerokit.bench.catalogue.engines import (
    ENGINES,
    GIB,
    Machine,
    refuse_if_too_large,
    require_known,
    state_of,
)
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError
from zerokit.formulas import predict_memory
from zerokit.layout import Parameter, Segment, build_layout
from zerokit.placement import Mesh, Placement
from zerokit.sizes import ElementBytes

# Millions of parameters, as published: of the papers in the catalogue's comments, of the released weights
# (GPT-2, Llama, BERT with its masked-language head), of torchvision's tables (ResNet, Inception with both heads).
PUBLISHED = {
    "gpt2": 124.44,
    "gpt2-medium": 354.82,
    "gpt2-large": 774.03,
    "gpt2-xl": 1557.61,
    "llama-1b": 1235.81,
    "llama-7b": 6738.42,
    "llama-8b": 8030.26,
    "llama-13b": 13_015.86,
    "llama-30b": 32_528.94,
    "llama-65b": 65_285.66,
    "llama-70b": 68_976.65,
    "bert-base": 109.51,
    "resnet50": 25.557,
    "resnet152": 60.193,
    "inception-v3": 27.161,
    "mlp-mnist": 0.203530,
    # The paper names these by rounded sizes.
    "gpt3-125m": 125,
    "gpt3-350m": 356,
    "gpt3-760m": 760,
    "gpt3-1.3b": 1300,
    "gpt3-2.7b": 2650,
    "gpt3-6.7b": 6700,
    "gpt3-13b": 12_850,
    "gpt3-175b": 174_600,
}


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_sizes_are_the_published_ones(name: str, millions: float) -> None:
    tolerance = 0.015 if name.startswith("gpt3-") else 1e-4
    assert describe(name).parameters == pytest.approx(millions * 1e6, rel=tolerance)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("resnet-50", "model 'resnet-50' is unknown: did you mean resnet50"),
        ("gpt3-175", "did you mean gpt3-175b"),
        ("zzz", "choose one of gpt-tiny, .*, inception-v3 \\(or package.module:factory"),
        ("", "is unknown"),
        ("mine.models:", "is not a factory: write package.module:function"),
    ],
)
def test_unknown_names_are_refused_with_what_is_close(wrong: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        describe(wrong)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("gpt2", {"seq_len": 1025}, "seq_len 1025 exceeds the 1024 positions of gpt2"),
        ("gpt2", {"image_size": 224}, "gpt2 takes no images: leave image_size 224 out"),
        ("mine:tiny", {"image_size": 8}, "takes no images"),
        ("linear", {"data": "numbers.csv"}, "linear makes its own data: omit --data numbers.csv"),
        ("resnet50", {"data": "photos"}, "makes its own data"),
        ("mlp-mnist", {"image_size": 32}, "takes images of 28 pixels a side, not 32"),
        ("resnet50", {"image_size": 31}, "image_size 31 is too small for resnet50: at least 32"),
        ("resnet50", {"image_size": 32, "batch_size": 1}, "needs a batch of at least 2"),
        ("inception-v3", {"batch_size": 1}, "inception-v3 at 299 pixels needs a batch of at least 2"),
    ],
)
def test_sizes_and_data_that_do_not_fit_are_refused(name: str, asked: dict[str, Any], message: str) -> None:
    require_known(Settings(model=name, data="synthetic"))
    with pytest.raises(UsageError, match=message):
        require_known(Settings(model=name, **asked))


def test_a_missing_library_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert describe("gpt-tiny").missing is None
    assert "not installed here; pip install deepspeed" in (ENGINES["deepspeed"].missing or "")
    assert "pip install 'zerokit[hf]'" in (describe("bert-base").missing or "")
    assert "built by torchvision, which is not installed here" in (describe("inception-v3").missing or "")


def test_the_papers_table() -> None:
    """ZeRO, figure 1: 7.5 billion parameters on 64 ranks; gradients in half precision, as DeepSpeed keeps them."""
    found = [
        state_of("deepspeed", stage, "bf16").bytes_of(parameters=7_500_000_000, world=64) / 1e9
        for stage in (0, 2, 3)
    ]
    assert found == pytest.approx([120.0, 16.6, 1.88], rel=3e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_what_the_runtime_predicts_without_padding(stage: int, precision: str) -> None:
    sizes = ElementBytes(4, 4, 0, 8) if precision == "fp32" else ElementBytes(2, 4, 4, 8)
    segments = [Segment(f"block{number}", (Parameter(f"weight{number}", (256, 256)),)) for number in range(4)]
    layout = build_layout(segments, world=4, bucket_bytes=2**19)
    predicted = predict_memory(layout, rank=0, placement=Placement.of(stage, Mesh(1, 4)), sizes=sizes)
    kept = predicted.parameters + predicted.gradients + predicted.optimizer
    bound = state_of("zerokit", stage, precision).bytes_of(parameters=layout.trainable_numel, world=4)
    assert kept == pytest.approx(bound, rel=1e-3)


@pytest.mark.parametrize("engine", ["zerokit", "ddp", "fsdp2"])
def test_muon_keeps_one_moment_and_adamw_two(engine: str) -> None:
    stage = ENGINES[engine].default_stage
    adamw, muon = (state_of(engine, stage, "fp32", name) for name in ("adamw", "muon"))
    assert (adamw.whole + adamw.shared) - (muon.whole + muon.shared) == 4


@pytest.mark.parametrize(("home", "fp32", "bf16"), [("host", 8, 12), ("disk", 8, 12), ("fp8", 6, 6)])
def test_states_elsewhere_take_no_memory_here(home: str, fp32: int, bf16: int) -> None:
    """Two moments of four bytes, and in bf16 a master; in fp8 two of one byte are left of the moments."""
    for precision, less in (("fp32", fp32), ("bf16", bf16)):
        before, after = (state_of("zerokit", 3, precision, "adamw", one) for one in ("device", home))
        assert before.shared - after.shared == less


HUGE, XL = Settings(model="gpt3-175b", nodes=2), Settings(model="gpt2-xl", nodes=2, stage=0)
LLAMA = Settings(model="llama-7b", nproc_per_node=4, engine="ddp", stage=0)  # 16 × 6.7 = 100.4 GiB a rank
ALONE = Settings(model="llama-7b", stage=3, precision="bf16", device="cuda")
DEVICE, SMALL = int(101 * GIB), Machine(int(16 * GIB), ())


@pytest.mark.parametrize(
    ("settings", "machine", "told"),
    [
        (HUGE, SMALL, "gpt3-175b is too large: zerokit at stage 2 in fp32 keeps at least 4Ψ + 12"),
        (HUGE, SMALL, "3,252.3 GiB for 2 ranks on this machine, which has 16.0 GiB; choose a sm"),
        (XL, Machine(int(30 * GIB), ()), "--stage 3 needs at least 23.2 GiB"),
        (Settings(), Machine(int(8 * GIB), ()), None),
        (Settings(model="mine:huge"), Machine(int(8 * GIB), ()), None),
        (replace(HUGE, device="cuda"), Machine(int(8 * GIB), ()), None),  # nothing is known of its devices
        (LLAMA, Machine(0, (DEVICE,) * 4), None),
        (LLAMA, Machine(0, (DEVICE,) * 3), "200.8 GiB for 2 ranks on CUDA device 0, which has 101.0 GiB"),
        (replace(LLAMA, device="cpu"), Machine(0, (DEVICE,) * 4), "for 4 ranks on this machine"),
        # 6 of 18 bytes a parameter stay on a device: 37.7 of 113.0 GiB for 6.7 billion.
        (ALONE, Machine(0, (DEVICE,)), "--stage 3 --states host needs at least 37.7 GiB there"),
        (replace(ALONE, states="host"), Machine(0, (DEVICE,)), None),
        (ALONE, Machine(0, (int(30 * GIB),)), "choose a smaller model or more machines"),
        (replace(ALONE, states="fp8"), Machine(0, (int(60 * GIB),)), "has 60.0 GiB; choose a smaller model"),
    ],
)
def test_what_cannot_fit_is_refused_in_plain_words_and_nothing_else(
    settings: Settings, machine: Machine, told: str | None
) -> None:
    reason = refuse_if_too_large(settings, machine)
    assert reason is None if told is None else reason is not None and told in reason
