"""accelerate's loop with ZeroOptimizer, beside the same loop with DDP."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import zerokit
from tests.integrations.launched import as_launched
from tests.support.distributed import run_alone, run_ranks
from tests.support.on_ranks import on_ranks
from zerokit.errors import (
    CheckpointError,
    NonFiniteError,
    UnsupportedOptimizer,
    UsageError,
    ZerokitWarning,
)
from zerokit.integrations.accelerate import ZeroAccelerator
from zerokit.integrations.optimizer_list import OptimizerList
from zerokit.placement import StageOfAll


def _model(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), norm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3))


def _loader(count: int = 25, batch_size: int = 3) -> DataLoader[tuple[Tensor, ...]]:
    """25 samples by 2 ranks and batches of 3: the last batch of an epoch is uneven."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)
    )
    return DataLoader(data, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(2))


MIXED: dict[str, StageOfAll] = {"0": 3, "4": 2, "*": 1}


def _accelerator(stage: Any, **options: Any) -> Any:
    """A `ZeroAccelerator` of that stage, or of stages by module; None is accelerate's own, and so DDP."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return (
        Accelerator(cpu=True, **options)
        if stage is None
        else ZeroAccelerator(cpu=True, stage=stage, **options)
    )


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 2e-2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def _muon(groups: list[dict[str, Any]], lr: float) -> OptimizerList:
    """Muon for the matrices, and AdamW for the rest."""
    return OptimizerList([torch.optim.Muon(groups[:1], lr=lr), torch.optim.AdamW(groups[1:], lr=lr)])


def _warmup(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7))


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=12)


def _sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    flat = LambdaLR(optimizer, lambda step: 0.5**step)
    return SequentialLR(optimizer, [_warmup(optimizer), flat], milestones=[4])


def _train(
    accelerator: Any, prepared: tuple[Any, ...], epochs: int, clip: str = "clip_grad_norm_"
) -> list[tuple[float, ...]]:
    model, optimizer, loader, schedule = prepared
    found = []
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = getattr(accelerator, clip)(
                        model.parameters(), 0.05 if clip == "clip_grad_value_" else 0.4
                    )
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rates = schedule.get_last_lr()
            found.append((loss.item(), -1.0 if norm is None else norm.item(), *rates))
        model.eval()
        with torch.no_grad():
            seen = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
        guesses, targets = (torch.cat(parts) for parts in zip(*seen, strict=True))
        assert len(guesses) == 25
        found.append((((guesses - targets) ** 2).mean().item(),))
    return found


def _prepare(
    accelerator: Any,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
    optimizer_class: Any,
    norm: type[nn.Module] = nn.BatchNorm1d,
) -> tuple[Any, ...]:
    model = _model(norm)
    optimizer = optimizer_class(_groups(model), lr=1e-2)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, _loader(), schedule(optimizer))
    return prepared


@on_ranks(2)
def test_the_same_training_as_under_ddp() -> None:
    """Losses, norms, learning rates and what `gather_for_metrics` gives; an epoch may end within an accumulation."""
    as_launched()
    for steps, schedule, optimizer_class, clip, stages in (
        (1, _one_cycle, torch.optim.AdamW, "clip_grad_norm_", (1, 2, 3, MIXED)),
        (3, _warmup, torch.optim.Adagrad, "clip_grad_norm_", (3,)),
        (2, _sequence, torch.optim.SGD, "clip_grad_value_", (1,)),
        (2, _warmup, _muon, "clip_grad_norm_", (0, 2, 3)),
    ):
        found = []
        for stage in (None, *stages):
            accelerator = _accelerator(stage, gradient_accumulation_steps=steps)
            prepared = _prepare(accelerator, schedule, optimizer_class)
            torch.manual_seed(dist.get_rank())  # dropout
            found.append(_train(accelerator, prepared, 2, clip))
        expected, *others = found
        assert len(expected) == 2 * (5 + 1)
        for other in others:
            for entry, wanted in zip(other, expected, strict=True):
                assert entry == pytest.approx(wanted, rel=1e-5, abs=1e-7)


# ---- checkpoints


def _save(directory: Path, optimizer_class: Any) -> list[tuple[float, ...]]:
    as_launched()
    accelerator = _accelerator(2, gradient_accumulation_steps=2)
    prepared = _prepare(accelerator, _warmup, optimizer_class)
    _train(accelerator, prepared, 1)
    accelerator.save_state(str(directory / "state"))
    _train(accelerator, prepared, 1)
    accelerator.save_state(str(directory / "state"))  # in place of the first one
    accelerator.save_model(prepared[0], str(directory / "model"))
    dist.barrier()
    assert [path.name for path in (directory / "state/zerokit").glob("step-*")] == ["step-00000001"]
    return _train(accelerator, prepared, 1)


def _load(directory: Path, stage: Any, optimizer_class: Any) -> list[tuple[float, ...]]:
    as_launched()
    accelerator = _accelerator(stage, gradient_accumulation_steps=2)
    prepared = _prepare(accelerator, _warmup, optimizer_class)
    for _ in range(4):  # as often as the saved training has gone through the data
        list(prepared[2])
    accelerator.load_state(str(directory / "state"))
    assert prepared[3].scheduler.last_epoch == 12
    zero = accelerator.zero_optimizer
    whole = load_file(directory / "model/model.safetensors")
    with zero.gathered():
        for name, value in prepared[0].state_dict().items():
            assert torch.equal(value, whole[name]), name
    assert accelerator.step == 0
    return _train(accelerator, prepared, 1)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, _muon])
def test_a_state_goes_on_at_any_world_size(tmp_path: Path, optimizer_class: Any) -> None:
    saved = run_ranks(2, _save, tmp_path, optimizer_class)
    assert run_ranks(2, _load, tmp_path, 3, optimizer_class) == saved
    assert run_ranks(2, _load, tmp_path, MIXED, optimizer_class) == saved
    run_ranks(3, _load, tmp_path, 1, optimizer_class)


@on_ranks(2)
def test_a_frozen_base_stays_out_of_states(tmp_path: Path) -> None:
    as_launched()

    def made(seed: float) -> tuple[Any, Any]:
        accelerator, model = _accelerator(3, frozen="never"), _model()
        nn.init.constant_(model[0].requires_grad_(False).get_parameter("weight"), seed)
        prepared = accelerator.prepare(
            model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        )
        return accelerator, prepared

    accelerator, (model, optimizer) = made(0.5)
    accelerator.backward(model(torch.ones(3, 6)).sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert zerokit.inspect(tmp_path / "zerokit").frozen == ""
    accelerator, (model, _) = made(0.5)
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    accelerator, _ = made(0.25)
    with pytest.raises(CheckpointError, match=r"not those of the training that saved it: 0\.weight\. Build"):
        accelerator.load_state(str(tmp_path))
    with pytest.raises(UsageError, match="frozen='once': expected 'always' or 'never'"):
        _accelerator(3, frozen="once")


def _newest(directory: Path) -> None:
    as_launched()
    config = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True)
    accelerator = _accelerator(2, project_config=config)
    prepared = _prepare(accelerator, _warmup, torch.optim.AdamW)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        accelerator.load_state()
    for _ in range(2):
        accelerator.save_state()
        _train(accelerator, prepared, 1)
    expected = {name: value.clone() for name, value in prepared[0].state_dict().items()}
    accelerator.project_configuration.iteration = 11  # sorts before 2 by name
    accelerator.save_state()
    _train(accelerator, prepared, 1)
    if dist.get_rank() == 0:
        (directory / "checkpoints/checkpoint_12/zerokit/step-00000000").mkdir(
            parents=True
        )  # killed while it saved
    dist.barrier()
    accelerator.load_state()
    for name, value in prepared[0].state_dict().items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_without_a_directory_the_newest_complete_state_is_loaded(tmp_path: Path) -> None:
    _newest(tmp_path)


# ---- precision


class _Recipe(KwargsHandler):
    """A handler of another kind of training, as those for fp8."""


@on_ranks(2)
def test_handlers_are_used_or_refused(tmp_path: Path) -> None:
    as_launched()
    scaler = GradScalerKwargs(init_scale=0.5, growth_interval=7)
    ddp = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.BF16, bucket_cap_mb=1, broadcast_buffers=False
    )
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    accelerator = _accelerator(
        2, mixed_precision="fp16", kwargs_handlers=[scaler, ddp, group, ProfileKwargs()]
    )
    model, *_ = _prepare(accelerator, _warmup, torch.optim.AdamW)
    zero = accelerator.zero_optimizer
    assert (zero.loss_scale, zero.scaler.interval, zero.scaler.floor) == (0.5, 7, 0.5)
    assert zero.precision.wire == torch.bfloat16
    assert zero.runtime.collectives._timeout == timedelta(seconds=77)
    with torch.no_grad():
        model.eval()
        model[1].running_mean.fill_(dist.get_rank())
        model(torch.ones(2, 6))
    assert bool((model[1].running_mean == dist.get_rank()).all())
    # Saved from the masters, in the dtype that the model had.
    accelerator.save_model(model, str(tmp_path))
    state = model.state_dict()
    dist.barrier()
    whole = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in whole.items() if "running" not in name)
    assert whole["0.weight"].dtype == torch.float32

    for words, mixed, handler in (
        ("fp32, bfloat16, int8 or int4", "no", _hook(DDPCommunicationHookType.POWER_SGD)),
        ("fp32, bfloat16, int8 or int4", "no", _hook(DDPCommunicationHookType.FP16)),
        ("mixed_precision='bf16'", "fp16", GradScalerKwargs(enabled=False)),
        ("mixed_precision='no'", "bf16", AutocastKwargs(enabled=False)),
        ("_Recipe", "no", _Recipe()),
    ):
        with pytest.raises(UsageError, match=words):
            _accelerator(2, mixed_precision=mixed, kwargs_handlers=[handler])
    scale = {"loss_scale": zerokit.LossScale()}
    with pytest.raises(UsageError, match="leave one of them out"):
        _accelerator(2, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs()], zero_options=scale)


def _hook(kind: DDPCommunicationHookType) -> DistributedDataParallelKwargs:
    return DistributedDataParallelKwargs(comm_hook=kind)


def _overflow() -> None:
    as_launched()
    options = {"zero_options": {"loss_scale": zerokit.LossScale(value=2.0**100)}, "mixed_precision": "fp16"}
    accelerator = _accelerator(3, **options)
    model, optimizer, loader, schedule = _prepare(accelerator, _warmup, torch.optim.AdamW, nn.LayerNorm)
    x, y = next(iter(loader))
    accelerator.backward(((model(x).float() - y) ** 2).mean())
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped
    assert schedule.get_last_lr()[1] == pytest.approx(1e-2 / 7)
    assert accelerator.zero_optimizer.precision == zerokit.Precision.of("fp16")
    # In other precisions as well, where that is not to be an error.
    for choice in ("skip", "raise"):
        accelerator = _accelerator(3, zero_options={"on_nonfinite": choice})
        model, optimizer, loader, schedule = _prepare(accelerator, _warmup, torch.optim.AdamW, nn.LayerNorm)
        accelerator.backward(model(x).mean() * math.nan)
        with pytest.raises(NonFiniteError) if choice == "raise" else pytest.warns(ZerokitWarning):
            optimizer.step()
        if choice == "skip":
            schedule.step()
            assert accelerator.optimizer_step_was_skipped
            assert schedule.get_last_lr()[1] == pytest.approx(1e-2 / 7)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as `accelerate launch --mixed_precision bf16` says it
    accelerator = _accelerator(3)
    prepared = _prepare(accelerator, _warmup, torch.optim.AdamW, nn.LayerNorm)
    assert prepared[0](x).dtype == torch.bfloat16
    del os.environ["ACCELERATE_MIXED_PRECISION"]


@on_ranks(2)
def test_states_on_a_disk_train_and_resume_as_on_the_device(tmp_path: Path) -> None:
    as_launched()
    home = tmp_path / "states"
    home.mkdir(exist_ok=True)
    found = {}
    for states in ("device", str(home)):
        for resumes in (False, True):
            accelerator = _accelerator(3, zero_options={"states": states}, mixed_precision="bf16")
            prepared = _prepare(accelerator, _warmup, torch.optim.AdamW, nn.LayerNorm)
            if resumes:  # what was saved with states elsewhere
                accelerator.load_state(str(tmp_path / "state"))
            found[states, resumes] = _train(accelerator, prepared, 1)
            accelerator.save_state(str(tmp_path / "state"))
    assert found["device", False] == found[str(home), False]
    assert found["device", True] == found[str(home), True] != found["device", False]


# ---- what is refused


@on_ranks(1)
def test_half_precision_and_what_is_refused(tmp_path: Path) -> None:
    as_launched()
    _overflow()
    model, frozen = _model(), _model().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accelerator = _accelerator(3, gradient_accumulation_steps=2)
    for words, wrong in (
        (r"prepare\(model, optimizer, ...\)", lambda: accelerator.prepare(model)),
        (r"prepare\(model, optimizer, ...\)", lambda: accelerator.prepare(optimizer)),
        (r"prepare\(model, optimizer\)", lambda: accelerator.prepare_model(model)),
        (r"prepare\(model, optimizer\)", lambda: accelerator.prepare_optimizer(optimizer)),
        (r"prepare\(model, optimizer\)", lambda: accelerator.backward(torch.ones((), requires_grad=True))),
        (r"prepare\(model, optimizer\)", lambda: accelerator.save_state(str(tmp_path))),
        (r"mixed_precision='fp8'", lambda: ZeroAccelerator(cpu=True, mixed_precision="fp8")),
        (r"stage", lambda: ZeroAccelerator(cpu=True, stage=4)),  # type: ignore[arg-type]
        (r"stage", lambda: ZeroAccelerator(cpu=True, stage={"*": 4})),  # type: ignore[dict-item]
        (r"leave one", lambda: ZeroAccelerator(cpu=True, precision={"*": "fp16"}, mixed_precision="bf16")),
        (r"zero_options: lr", lambda: ZeroAccelerator(cpu=True, zero_options={"lr": 1.0})),
        (r"leave one", lambda: ZeroAccelerator(cpu=True, precision="fp16", mixed_precision="bf16")),
        (r"block\.compile", lambda: _accelerator(1, dynamo_backend="inductor")),
    ):
        with pytest.raises(UsageError, match=words):
            wrong()
    accelerator = _accelerator(3, gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    accelerator = _accelerator(3, gradient_accumulation_steps=2)
    found, teacher, stepping = accelerator.prepare(model, frozen, optimizer)
    assert teacher is frozen
    x = torch.randn(4, 6)
    with accelerator.accumulate(found):
        accelerator.backward(found(x).sum())
        with pytest.raises(UsageError, match=r"if accelerator\.sync_gradients:"):
            accelerator.clip_grad_norm_(found.parameters(), 1.0)
        stepping.step()  # the last micro-batch is still to come
        with pytest.warns(zerokit.ZerokitWarning, match=r"if accelerator\.sync_gradients:"):
            accelerator.save_state(str(tmp_path / "early"))
    assert not accelerator.optimizer_step_was_skipped
    accelerator.backward(found(x).sum())
    accelerator.sync_gradients = True
    for words, wrong in (
        ("some parameters only", lambda: accelerator.clip_grad_norm_(found[0].parameters(), 1.0)),
        (r"step the one that prepare\(\) has returned", optimizer.step),
        ("one model", lambda: accelerator.prepare(_model(), torch.optim.SGD(_model().parameters()))),
        (r"load_state\(directory\)", accelerator.load_state),
        ("not written by ZeroAccelerator", lambda: accelerator.load_state(str(tmp_path))),
        (r"zerokit\.LocalSteps", LocalSGD(accelerator, found, 2).__enter__),
    ):
        with pytest.raises(UsageError, match=words):
            wrong()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(UsageError, match="save_model"):
        accelerator.save_state(str(tmp_path))
    (tmp_path / "zerokit").mkdir()
    with pytest.raises(CheckpointError):
        zerokit.load(tmp_path / "zerokit", accelerator.zero_optimizer)


@on_ranks(2)
def test_accelerates_own_prepare_of_a_divided_model_is_refused_with_the_line_to_write() -> None:
    model = _model(nn.LayerNorm)
    zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=0.1)
    as_launched()
    prepared = _accelerator(None).prepare(model)
    with pytest.raises(UsageError, match="ZeroAccelerator"):
        prepared(torch.ones(2, 6))
    assert zero.runtime.model is model, "there as long as its model is called"


def _without_lightning() -> str:
    import sys

    for name in ("lightning", "pytorch_lightning"):
        sys.modules[name] = None  # type: ignore[assignment]
    with pytest.raises(ImportError) as raised:
        import zerokit.integrations.lightning  # noqa: F401
    return str(raised.value)


def test_without_lightning_the_import_says_what_to_install() -> None:
    assert "pip install pytorch-lightning" in run_alone(_without_lightning)
