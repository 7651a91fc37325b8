"""The exact batch in the libraries' loops: unequal tokens on ranks and micro-batches, and the update of one process."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaForCausalLM

from tests.integrations.launched import as_launched
from tests.integrations.trainers import arguments, build, history, texts, trainer
from tests.support.distributed import run_ranks
from zerokit.errors import UsageError
from zerokit.integrations.accelerate import ZeroAccelerator
from zerokit.placement import stage_of

# ---- transformers


def _uneven(count: int) -> Any:
    """Texts of which 0 to 8 tokens count; the first micro-batch of a rank has none."""
    return texts(count, lambda number: 9 if number in (2, 3) else 1 + 7 * (number % 3) // 2, seed=3)


class _MeansOnly(LlamaForCausalLM):
    """A model that takes no count: its loss is the mean of a batch."""

    accepts_loss_kwargs = False


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


CASES: dict[str, dict[str, Any]] = {
    "by default": {},
    "each rank divides": {"average_tokens_across_devices": False},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing, each rank divides": {"label_smoothing_factor": 0.1, "average_tokens_across_devices": False},
    "own loss": {"own_loss": True},
    "own loss, each rank divides": {"own_loss": True, "average_tokens_across_devices": False},
    "own loss of a model of means": {"own_loss": True, "means": True},
    "clipped not": {"max_grad_norm": 0.0},
}


def _trained(stage: int | None, changes: dict[str, Any], directory: str) -> tuple[list[Tensor], Any]:
    """20 samples in steps of 8, 8 and 4: by one rank at once, by two in micro-batches of 2, whose last step has one."""
    options: dict[str, Any] = {"train_dataset": _uneven(20), "eval_dataset": _uneven(2)}
    changes = {"optim": "sgd", "learning_rate": 0.5, "warmup_steps": 0, "weight_decay": 0.0} | changes
    options["model"] = build()
    if changes.pop("means", False):
        options["model"].__class__ = _MeansOnly
    if changes.pop("own_loss", False):
        options["compute_loss_func"] = _own_loss
    each = 8 if dist.get_world_size() == 1 else 2
    args = arguments(
        directory,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=8 // each // dist.get_world_size(),
        eval_strategy="epoch",
        **changes,
    )
    made = trainer(stage, args, **options)
    made.train()
    found = history(made)
    if stage is None:
        return [p.detach().clone() for p in made.model.parameters()], found
    with made.zero_optimizer.gathered():
        return [p.detach().clone() for p in made.model.parameters()], found


def _all_cases(stages: tuple[int | None, ...], directory: str) -> list[list[tuple[list[Tensor], Any]]]:
    as_launched()
    return [[_trained(stage, changes, directory) for stage in stages] for changes in CASES.values()]


def test_trainers_update_is_that_of_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    """Weights, logged losses and norms; a model that takes no count hands none over, but for a loss of one's own."""
    (alone,) = run_ranks(1, _all_cases, (None,), str(tmp_path))
    for rank in run_ranks(2, _all_cases, (3,), str(tmp_path)):
        for case, ((weights, entries),), found in zip(CASES, alone, rank, strict=True):
            assert sum("grad_norm" in entry for entry in entries) == 6
            for ours, our_entries in found:
                for one, other in zip(ours, weights, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=case)
                for entry, expected in zip(our_entries, entries, strict=True):
                    for name in entry.keys() & {"loss", "grad_norm", "train_loss"}:
                        assert entry[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (case, name)


# ---- sums and counts in loops of one's own


class _Sequences(Dataset[Any]):
    """Inputs and targets of 1 to 9 tokens."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
        self.samples = [torch.randn(length, 6, generator=generator) for length in lengths]

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _sum(model: nn.Module, x: Tensor) -> Tensor:
    differences: Tensor = model(x) - x[:, :3].sin()
    return differences.square().sum()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


COUNT, STEP = 26, 12
"""Samples, and those of a step; the last step of an epoch has 2."""


def _alone() -> list[Tensor]:
    """What one process makes of whole steps, in two epochs."""
    model, data = _net(), _Sequences(COUNT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in [*range(0, COUNT, STEP)] * 2:
        x = torch.cat([data[at] for at in range(first, min(first + STEP, COUNT))])
        (_sum(model, x) / len(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _loader() -> DataLoader[Any]:
    return DataLoader(_Sequences(COUNT), batch_size=1, collate_fn=torch.cat)


def _accelerated(stage: int, *, at_once: bool) -> list[Tensor]:
    as_launched()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = ZeroAccelerator(
        cpu=True, stage=stage_of(stage), gradient_accumulation_steps=STEP // dist.get_world_size()
    )
    if at_once:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    model = _net()
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), _loader())
    model, optimizer, loader = prepared
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_sum(model, x), count=len(x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()
    zero = accelerator.zero_optimizer
    assert zero is not None
    assert zero.last_count == sum(len(x) for x in _Sequences(COUNT).samples[-2:])
    with zero.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def _close(found: list[Tensor]) -> None:
    for ours, theirs in zip(found, _alone(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_accelerates_loop_divides_sums_by_the_count_alone(stage: int, *, at_once: bool) -> None:
    for weights in run_ranks(2, _accelerated, stage, at_once=at_once):
        _close(weights)


# ---- Lightning


def _fitted(kind: str, stage: int, **options: Any) -> list[Tensor]:
    as_launched()
    os.environ.update(GROUP_RANK="0", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl: Any = import_module(
        "lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning"
    )
    strategy = import_module("zerokit.integrations.lightning").ZeroStrategy
    micro = STEP // dist.get_world_size()
    manual = kind == "manual"

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            self.automatic_optimization = not manual

        def training_step(self, x: Tensor, number: int) -> Any:
            loss = _sum(self.net, x)
            if kind == "no count":
                return {"loss": loss}
            if not manual:
                return {"loss": loss, "tokens": len(x)}
            self.manual_backward(loss, count=len(x))
            if (number + 1) % micro == 0 or self.trainer.is_last_batch:
                optimizer = self.optimizers()
                optimizer.clip_grad_norm_(0.2)
                optimizer.step()
                optimizer.zero_grad()
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class OwnBackward(Net):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

    module = OwnBackward() if kind == "own backward" else Net()
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    steps = {} if manual else {"accumulate_grad_batches": micro, "gradient_clip_val": 0.2}
    run = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy(stage=stage_of(stage), **({} if manual else {"count_key": "tokens"}), **options),
        max_epochs=2,
        **quiet,
        **steps,
    )
    data = _Sequences(COUNT)
    in_turn: DistributedSampler[Any] = DistributedSampler(
        data, shuffle=False
    )  # Lightning's own would shuffle
    run.fit(module, DataLoader(data, batch_size=1, collate_fn=torch.cat, sampler=in_turn))
    with run.strategy.zero_optimizer.gathered():
        return [parameter.detach().clone() for parameter in module.parameters()]


LIGHTNING = pytest.mark.skipif(
    find_spec("lightning") is None and find_spec("pytorch_lightning") is None,
    reason="needs lightning or pytorch-lightning",
)


@LIGHTNING
@pytest.mark.parametrize(("kind", "stage"), [("manual", 3), ("automatic", 3), ("automatic", 1)])
def test_lightnings_loop_divides_sums_by_the_count_alone(kind: str, stage: int) -> None:
    for weights in run_ranks(2, _fitted, kind, stage):
        _close(weights)


def _refused() -> None:
    with pytest.raises(UsageError, match="training_step returned a dictionary of 'loss': return"):
        _fitted("no count", 2)
    with pytest.raises(UsageError, match="differentiate a sum without its count"):
        _fitted("own backward", 2)


@LIGHTNING
def test_a_sum_without_its_count_is_refused() -> None:
    run_ranks(1, _refused)
