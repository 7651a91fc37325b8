"""What only a GPU shows: NCCL on streams of its own, a host that runs ahead, kernels in half precision, compilers.

NCCL for one rank on one GPU. Where a host can run the same function the device's way, it does.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable
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
    placed,
    prompt,
    run_on,
    train,
)
from tests.support.optimizers import FUSED, OPTIMIZERS
from tests.support.training import whole_weights
from zerokit.errors import UsageError

gpu = pytest.mark.gpu
STACK = SCENES["units used again"]

# --- a step synchronises nothing ---------------------------------------------------------------------------


def _steps_without_synchronisation(device: str, precision: str) -> None:
    """At every stage, clipping or not, from the third step on."""
    with alone_on_gpu(device):
        for stage, clip in itertools.product(STAGES, (None, 1.0)):
            training = Training(
                at(STACK, stage=stage, precision=precision, clip=clip, steps=5), placed(device)
            )
            for step in range(5):
                if step == 2:
                    _refuse_synchronisation("error")
                training.step(step)
            _refuse_synchronisation("default")
            training.bits()


def _refuse_synchronisation(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode(mode)


@gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_step_synchronises(precision: str) -> None:
    """zerokit asks events, which is no synchronisation; `test_device_control` counts what a step reads."""
    run_on("cuda", _steps_without_synchronisation, precision)


def _synchronise_once(device: str) -> str:
    with alone_on_gpu(device):
        value = torch.ones((), device=placed(device))
        _refuse_synchronisation("error")
        try:
            value.item()
        except RuntimeError as error:
            return str(error)
        finally:
            _refuse_synchronisation("default")
    return ""


@gpu
def test_a_synchronisation_would_be_seen() -> None:
    (message,) = run_on("cuda", _synchronise_once)
    assert "synchroniz" in message


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


def _stages_with_optimizer(device: str, name: str, options: dict[str, Any]) -> list[list[str]]:
    with prompt(device) as place:
        return [train(at(STACK, stage=stage, optimizer=name), place, **options) for stage in (0, 3)]


def _optimizers() -> list[tuple[str, dict[str, Any]]]:
    plain: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in OPTIMIZERS]
    return plain + [(name, {"fused": False}) for name in OPTIMIZERS if name in FUSED]


@pytest.mark.parametrize("device", DEVICES)
def test_every_optimizer_at_every_stage(device: str) -> None:
    wrong = []
    for rank in run_on(device, _all_optimizers):
        for case, outcome in rank.items():
            if outcome:
                wrong.append(f"{case}: {outcome}")
    assert wrong == []


def _all_optimizers(device: str) -> dict[str, str]:
    """What went wrong, by optimizer; the others go on."""
    found = {}
    with alone_on_gpu(device):
        for name, options in _optimizers():
            try:
                first, *others = _stages_with_optimizer(device, name, options)
                found[f"{name} {options}"] = "" if others == [first] else "stages differ"
            except (RuntimeError, zerokit.ZerokitError) as error:
                found[f"{name} {options}"] = f"{type(error).__name__}: {error}"
    return found


def _go_on(device: str, precision: str, folder: str) -> list[int]:
    """Stages at which going on from a state, or a checkpoint in a folder, differs from going on without."""
    wrong = []
    with prompt(device) as place:
        for stage in STAGES:
            scene = at(STACK, stage=stage, precision=precision)
            first, second = Training(scene, place), Training(scene, place)
            first.step(0)
            first.step(1)
            second.step(0)
            schedule: Any = copy.deepcopy(first.scheduler.state_dict())
            if folder:
                zerokit.save(f"{folder}/{stage}", first.optimizer, step=2, extra={"schedule": schedule})
                schedule = zerokit.load(f"{folder}/{stage}", second.optimizer)["schedule"]
            else:
                second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
            second.scheduler.load_state_dict(schedule)
            for training in (first, second):
                training.step(2)
                training.step(3)
            if second.weights() != first.weights():
                wrong.append(stage)
    return wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_from_a_state_dict(device: str, precision: str) -> None:
    for wrong in run_on(device, _go_on, precision, ""):
        assert wrong == []


def _change_whole_weights(device: str) -> list[tuple[bool, list[str]]]:
    """By stage: whether `gathered()` shows what `state_dict()` does; bits after a change inside."""
    found = []
    with prompt(device) as place:
        for stage in STAGES:
            training = Training(at(STACK, stage=stage, precision="bf16"), place)
            training.step(0)
            expected = whole_weights(training.model)
            with training.optimizer.gathered():
                same = all(
                    torch.equal(parameter.detach(), expected[name])
                    for name, parameter in training.model.named_parameters()
                )
                with torch.no_grad():
                    for parameter in training.model.parameters():
                        parameter.mul_(0.5)
            training.step(1)
            found.append((same, training.bits()))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_gathered_shows_and_keeps_whole_weights(device: str) -> None:
    for found in run_on(device, _change_whole_weights):
        assert found == [(True, found[0][1])] * len(STAGES)


def _misuse(device: str) -> list[tuple[str, str]]:
    """Words that are expected, and what was said."""
    said = []
    with prompt(device) as place:
        training = Training(at(STACK, stage=3), place)
        model = training.model

        def read_freed() -> None:
            (model.get_parameter("blocks.0.inner.weight") + 1).sum()

        attempts: list[tuple[str, Callable[[], Any]]] = [
            ("before any backward", training.optimizer.step),
            ("optimizer.gathered()", read_freed),
            (".half()", model.half),
        ]
        if device == "cuda":
            left_behind = torch.nn.Linear(4, 4)
            attempts += [
                ("before ZeroOptimizer", lambda: model.to("cpu")),
                ("model.to('cuda')", lambda: zerokit.ZeroOptimizer(left_behind, torch.optim.AdamW)),
            ]
        for words, attempt in attempts:
            try:
                attempt()
                said.append((words, "nothing"))
            except (UsageError, RuntimeError) as error:
                said.append((words, f"{type(error).__name__}: {error}"))
        for step in range(4):
            training.step(step)
    return said


@pytest.mark.parametrize("device", DEVICES)
def test_misuse_is_refused_and_training_goes_on(device: str) -> None:
    for rank in run_on(device, _misuse):
        for words, said in rank:
            assert said.startswith("UsageError"), said
            assert words in said


def _train_on_another_stream(device: str, built_inside: bool) -> list[str]:
    """Stages that differ from the default stream's run."""
    # torch notes where the hooks of parameters were made, and warns where they run on another stream.
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warning is not None:
        set_warning(False)
    wrong = []
    with alone_on_gpu(device):
        for stage in STAGES:
            scene = at(STACK, stage=stage, precision="bf16")
            expected = train(scene, placed(device))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            training = None if built_inside else Training(scene, placed(device))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                training = training or Training(scene, placed(device))
                torch.cuda._sleep(200_000_000)  # whoever works on the default stream would be far ahead
                for step in range(scene.run.steps):
                    training.step(step)
                bits = training.bits()
            if bits != expected:
                wrong.append(f"stage {stage}")
    return wrong


@gpu
@pytest.mark.parametrize("built_inside", [True, False])
def test_the_current_stream_may_be_another_one(built_inside: bool) -> None:
    assert run_on("cuda", _train_on_another_stream, built_inside) == [[]]


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.skipif(not importlib.util.find_spec("zlib_ng"), reason="checkpoints need zlib-ng")
def test_training_goes_on_from_checkpoints(device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="zerokit-checkpoints-") as folder:
        for wrong in run_on(device, _go_on, "bf16", folder):
            assert wrong == []
