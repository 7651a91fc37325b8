"""What cannot fit is refused before anything starts, and nothing that could have run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.bench.catalogue.engines import ENGINES, GIB, Machine, refuse_if_too_large, state_of
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.settings import Settings
from zerokit.formulas import ElementBytes, predict_memory
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.placement import Mesh, Placement

CELLS = st.one_of(
    [
        st.tuples(st.just(name), st.sampled_from(engine.stages), st.sampled_from(["fp32", "bf16"]))
        for name, engine in ENGINES.items()
    ]
)


def test_the_papers_table() -> None:
    """ZeRO, figure 1: 7.5 billion parameters on 64 ranks; gradients in half precision, as DeepSpeed keeps them."""
    found = [
        state_of("deepspeed", stage, "bf16").bytes_of(0, parameters=7_500_000_000, world=64) / 1e9
        for stage in (0, 2, 3)
    ]
    assert found == pytest.approx([120.0, 16.6, 1.88], rel=3e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_what_the_runtime_predicts_without_padding(stage: int, precision: str) -> None:
    sizes = ElementBytes(4, 4, 0, 8) if precision == "fp32" else ElementBytes(2, 4, 4, 8)
    layout = made_layout(world=4)
    predicted = predict_memory(layout, rank=0, placement=Placement.of(stage, Mesh(1, 4)), sizes=sizes)
    kept = predicted.parameters + predicted.gradients + predicted.optimizer
    bound = state_of("zerokit", stage, precision).bytes_of(0, parameters=layout.trainable_numel, world=4)
    assert kept == pytest.approx(bound, rel=1e-3)


def made_layout(world: int) -> Layout:
    segments = [Segment(f"block{number}", (Parameter(f"weight{number}", (256, 256)),)) for number in range(4)]
    return build_layout(segments, world=world, bucket_bytes=2**19)


@given(CELLS, st.integers(1, 10**12), st.integers(1, 64))
def test_ranks_together_keep_at_least_one_copy_and_at_most_one_each(
    cell: tuple[str, int, str], parameters: int, world: int
) -> None:
    state = state_of(*cell)
    each = [state.bytes_of(rank, parameters=parameters, world=world) for rank in range(world)]
    assert 14 * parameters - world <= sum(each) <= 18 * parameters * world
    assert max(each) == each[0]


HUGE, XL = Settings(model="gpt3-175b", nodes=2), Settings(model="gpt2-xl", nodes=2, stage=0)
LLAMA = Settings(model="llama-7b", nproc_per_node=4, engine="ddp", stage=0)  # 16 × 6.7 = 100.4 GiB a rank
DEVICE = int(101 * GIB)


@pytest.mark.parametrize(
    ("settings", "machine", "told"),
    [
        (
            HUGE,
            Machine(int(16 * GIB), ()),
            "gpt3-175b is too large: zerokit at stage 2 in fp32 keeps at least 4Ψ + 12",
        ),
        (
            HUGE,
            Machine(int(16 * GIB), ()),
            "3,252.3 GiB for 2 ranks on this machine, which has 16.0 GiB; choose a sm",
        ),
        (XL, Machine(int(30 * GIB), ()), "--stage 3 needs at least 23.2 GiB"),
        (Settings(), Machine(int(8 * GIB), ()), None),
        (Settings(model="mine:huge"), Machine(int(8 * GIB), ()), None),
        (HUGE, Machine(None, ()), None),  # nothing is known of it
        (replace(HUGE, device="cuda"), Machine(int(8 * GIB), ()), None),  # nor of its devices
        (LLAMA, Machine(0, (DEVICE,) * 4), None),
        (LLAMA, Machine(0, (DEVICE,) * 3), "200.8 GiB for 2 ranks on CUDA device 0, which has 101.0 GiB"),
        (replace(LLAMA, device="cpu"), Machine(0, (DEVICE,) * 4), "for 4 ranks on this machine"),
    ],
)
def test_what_cannot_fit_is_refused_in_plain_words_and_nothing_else(
    settings: Settings, machine: Machine, told: str | None
) -> None:
    reason = refuse_if_too_large(settings, machine)
    assert reason is None if told is None else reason is not None and told in reason


def test_only_the_server_of_parameters_keeps_optimizer_state() -> None:
    settings = Settings(model="gpt2", engine="parameter-server", stage=0, nproc_per_node=3)
    needed = (16 + 8 + 8) * (describe("gpt2").parameters or 0)
    assert refuse_if_too_large(settings, Machine(needed, ())) is None
    assert refuse_if_too_large(settings, Machine(needed - 1, ())) is not None
