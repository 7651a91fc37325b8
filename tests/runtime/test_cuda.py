"""What only a GPU shows: NCCL on streams of its own, a host that runs ahead, kernels in half precision, compilers.

NCCL for one rank on one GPU. Where a host can run the same function the device's way, it does.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokit
from tests.support.devices import (
    DEVICES,
    PRECISIONS,
    SCENES,
    STAGES,
    Training,
    alone_on_gpu,
    at,
    no_synchronisation,
    placed,
    prompt,
    run_on,
    train,
)
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import FUSED, OPTIMIZERS
from tests.support.recording import RecordingRoute
from tests.support.training import whole_weights
from zerokit.errors import UsageError
from zerokit.runtime.norms import all_finite, global_norm

gpu = pytest.mark.gpu
on_both = pytest.mark.parametrize("device", DEVICES)
RANKS = {"cpu": 2, "cuda": 1}
STACK = SCENES["units used again"]

# --- a step synchronises nothing ---------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(1)
def test_no_step_synchronises(precision: str) -> None:
    """From the third on. zerokit asks events, which is no synchronisation; `test_device_control` counts reads."""
    with alone_on_gpu("cuda"):
        for stage, clip in itertools.product(STAGES, (None, 1.0)):
            scene = at(STACK, stage=stage, precision=precision, clip=clip, steps=5)
            training = Training(scene, placed("cuda"))
            training.step(0)
            training.step(1)
            with no_synchronisation():
                for step in range(2, 5):
                    training.step(step)
            training.bits()


@gpu
@on_ranks(1)
def test_a_synchronisation_would_be_seen() -> None:
    with alone_on_gpu("cuda"):
        value = torch.ones((), device=placed("cuda"))
        with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
            value.item()


# --- the host runs ahead -----------------------------------------------------------------------------------

_SLEEP_CYCLES = 2_000_000_000
"""About a second."""


def _behind_a_busy_device(device: str, precision: str) -> list[tuple[float, bool, float]]:
    """By stage: seconds of the host for a step, whether the device still slept then, seconds until all was done."""
    found = []
    with alone_on_gpu(device):
        for stage in STAGES:
            training = Training(at(STACK, stage=stage, precision=precision, steps=6), placed(device))
            torch.cuda._sleep(1000)
            for step in range(5):
                training.step(step)
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
            awake = torch.cuda.Event()
            awake.record()
            start = time.perf_counter()
            training.step(5)
            host_s, asleep = time.perf_counter() - start, not awake.query()
            torch.cuda.synchronize()
            found.append((host_s, asleep, time.perf_counter() - start))
    return found


@gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_returns_while_the_device_is_busy(
    precision: str, record_property: Callable[[str, object], None]
) -> None:
    """fp16 must know whether gradients overflowed, and waits."""
    (found,) = run_on("cuda", _behind_a_busy_device, precision)
    for stage, (host_s, asleep, device_s) in enumerate(found):
        record_property(f"stage {stage}", f"host {1e3 * host_s:.1f} ms, device {1e3 * device_s:.0f} ms")
        assert device_s > 0.3, "the device did not sleep long enough to tell"
        assert asleep == (precision != "fp16"), f"stage {stage}: the host took {host_s} s of {device_s} s"


# --- the user's side ---------------------------------------------------------------------------------------

KERNELS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in OPTIMIZERS],
    *[(name, {"fused": False}) for name in OPTIMIZERS if name in FUSED],
]


@on_both
@on_ranks(RANKS)
def test_every_optimizer_at_every_stage(device: str) -> None:
    wrong = []
    with prompt(device) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"this .+ cannot leave out a step on the device")
        for name, options in KERNELS:
            try:
                first, last = (
                    train(at(STACK, stage=stage, optimizer=name), place, **options) for stage in (0, 3)
                )
                outcome = "" if first == last else "stages differ"
            except (RuntimeError, zerokit.ZerokitError) as error:  # the others go on
                outcome = f"{type(error).__name__}: {error}"
            wrong += [f"{name} {options}: {outcome}"] if outcome else []
    assert wrong == []


def _go_on(device: str, precision: str, folder: Path | None = None) -> None:
    """Going on from a state, or a checkpoint in a folder, equals going on without."""
    with prompt(device) as place:
        for stage in STAGES:
            scene = at(STACK, stage=stage, precision=precision)
            first, second = Training(scene, place), Training(scene, place)
            first.step(0)
            first.step(1)
            second.step(0)
            schedule: Any = copy.deepcopy(first.scheduler.state_dict())
            if folder is not None:
                zerokit.save(folder / str(stage), first.optimizer, step=2, extra={"schedule": schedule})
                schedule = zerokit.load(folder / str(stage), second.optimizer)["schedule"]
            else:
                second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
            second.scheduler.load_state_dict(schedule)
            for training in (first, second):
                training.step(2)
                training.step(3)
            assert second.weights() == first.weights(), f"stage {stage}"


@on_both
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(RANKS)
def test_training_goes_on_from_a_state_dict(device: str, precision: str) -> None:
    _go_on(device, precision)


@on_both
@pytest.mark.skipif(not importlib.util.find_spec("zlib_ng"), reason="checkpoints need zlib-ng")
@on_ranks(RANKS)
def test_training_goes_on_from_checkpoints(device: str, tmp_path: Path) -> None:
    _go_on(device, "bf16", tmp_path)


@on_both
@on_ranks(RANKS)
def test_gathered_shows_and_keeps_whole_weights(device: str) -> None:
    found = []
    with prompt(device) as place:
        for stage in STAGES:
            training = Training(at(STACK, stage=stage, precision="bf16"), place)
            training.step(0)
            expected = whole_weights(training.model)
            with training.optimizer.gathered(), torch.no_grad():
                for name, parameter in training.model.named_parameters():
                    assert torch.equal(parameter, expected[name].to(parameter.dtype))
                    parameter.mul_(0.5)
            training.step(1)
            found.append(training.bits())
    assert found == [found[0]] * len(STAGES)


@on_both
@on_ranks(RANKS)
def test_misuse_is_refused_and_training_goes_on(device: str) -> None:
    with prompt(device) as place:
        training = Training(at(STACK, stage=3), place)
        model = training.model
        weight = model.get_parameter("blocks.0.inner.weight")
        attempts: list[tuple[str, Callable[[], Any]]] = [
            ("before any backward", training.optimizer.step),
            (r"optimizer\.gathered\(\)", lambda: weight + 1),
            (r"\.half\(\)", model.half),
        ]
        if device == "cuda":
            left_behind = torch.nn.Linear(4, 4)
            attempts += [
                ("before ZeroOptimizer", lambda: model.to("cpu")),
                (r"model\.to\('cuda'\)", lambda: zerokit.ZeroOptimizer(left_behind, torch.optim.AdamW)),
            ]
        for words, attempt in attempts:
            with pytest.raises(UsageError, match=words):
                attempt()
        for step in range(4):
            training.step(step)


@gpu
@pytest.mark.parametrize("built_inside", [True, False])
@on_ranks(1)
def test_the_current_stream_may_be_another_one(built_inside: bool) -> None:
    # torch notes where the hooks of parameters were made, and warns where they run on another stream.
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warning is not None:
        set_warning(False)
    with alone_on_gpu("cuda"):
        place = placed("cuda")
        for stage in STAGES:
            scene = at(STACK, stage=stage, precision="bf16")
            expected = train(scene, place)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            training = None if built_inside else Training(scene, place)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                training = training or Training(scene, place)
                torch.cuda._sleep(200_000_000)  # whoever works on the default stream would be far ahead
                for step in range(scene.run.steps):
                    training.step(step)
                assert training.bits() == expected, f"stage {stage}"


def _compiled(device: str) -> tuple[str, dict[int, list[float]]]:
    """Why no compiler works, or else: by stage, the losses of compiled blocks; at -1 those of plain ones."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # this process may have no children
    warnings.simplefilter("ignore")  # compilers say much
    with alone_on_gpu(device):
        try:
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=placed(device)))
        except Exception as error:
            return f"{type(error).__name__}: {error}", {}
        losses = {}
        for stage in (-1, 0, 3):
            training = Training(at(SCENES["plain"], stage=max(stage, 0)), placed(device))
            if stage >= 0:
                for block in training.model.get_submodule("blocks").children():
                    block.compile()
            for step in range(training.run.steps):
                training.step(step)
            losses[stage] = training.losses()
        return "", losses


@gpu
def test_compiled_blocks_train_alike() -> None:
    ((reason, losses),) = run_on("cuda", _compiled)
    if reason:
        pytest.skip(f"no compiler works here: {reason.splitlines()[0]}")
    for stage in (0, 3):
        assert losses[stage] == pytest.approx(losses[-1], rel=1e-4)


@gpu
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_cut_of_the_line_does_not_show_in_norms(norm_type: float) -> None:
    route = RecordingRoute()
    route.device = torch.device("cuda")
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(values.double(), norm_type))
    device = values.cuda()
    for piece in (100_000, 64_000, 1_000):
        found, _ = global_norm([*device.split(piece), device[:0]], norm_type, route)
        assert found.dtype == torch.float64
        assert float(found) == pytest.approx(exact, rel=1e-12)
    assert bool(all_finite(list(device.split(999)), route.device))
    device[77] = math.nan
    assert not bool(all_finite(list(device.split(999)), route.device))
