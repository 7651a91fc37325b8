"""What other libraries' loops cost over zerokit's plain one: the same Llama, batches and ranks, stage 3 in fp32.

Every training runs in fresh processes; rounds alternate their order. A step is timed from the end of one update to the
end of the next, whatever the loop does between. Needs accelerate, transformers and Lightning.

python benchmarks/integration_cost.py
python benchmarks/integration_cost.py --rounds 5 --steps 20
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options
from benchmarks.ranks import run_ranks
from zerokit import ZeroOptimizer

WORLD, WARMUP = 2, 4
LENGTH, BATCH, RATE = 128, 2, 1e-4
BAR = 1.03
"""The most that a step may take of the plain loop's."""


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def _data(samples: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 8192, (samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _loader(steps: int) -> Any:
    return DataLoader(_data(steps * BATCH * WORLD), batch_size=BATCH)  # type: ignore[arg-type]


def train_plainly(steps: int, folder: str) -> None:
    """zerokit's loop, as the README has it."""
    dist.init_process_group("gloo")
    model, data = _model(), _data(steps * BATCH * WORLD)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=RATE)
    sampler: Any = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(data, batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
    for batch in loader:
        optimizer.backward(model(**batch).loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_by_accelerate(steps: int, folder: str) -> None:
    """accelerate's loop over `ZeroAccelerator`."""
    from zerokit.integrations.accelerate import ZeroAccelerator

    accelerator = ZeroAccelerator(stage=3, cpu=True)
    model = _model()
    made = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, made, _loader(steps))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_by_transformers(steps: int, folder: str) -> None:
    """transformers' `Trainer`."""
    from transformers import TrainingArguments

    from zerokit.integrations.transformers import ZeroTrainer

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data: Any = _data(steps * BATCH * WORLD)
    ZeroTrainer(_model(), arguments, train_dataset=data, stage=3).train()


def train_by_lightning(steps: int, folder: str) -> None:
    """Lightning's `Trainer` over `ZeroStrategy`."""
    import pytorch_lightning as lightning

    from zerokit.integrations.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: dict[str, Any], number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    lightning.Trainer(
        strategy=ZeroStrategy(stage=3),
        accelerator="cpu",
        devices=WORLD,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(Module(), _loader(steps))


LOOPS: dict[str, Callable[[int, str], None]] = {
    "plain loop": train_plainly,
    "accelerate": train_by_accelerate,
    "transformers": train_by_transformers,
    "Lightning": train_by_lightning,
}


def measure(name: str, steps: int) -> list[float]:
    """Train on this rank: milliseconds of its steps."""
    warnings.simplefilter("ignore")
    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    with tempfile.TemporaryDirectory(prefix="zerokit-integration-") as folder:
        LOOPS[name](steps + WARMUP, folder)
    # The first are steps on a few elements, by which zerokit looks at the optimizer; then come those of the warm-up.
    return [(end - begun) * 1000.0 for begun, end in pairwise(ends)][-steps:]


def main(words: Sequence[str] | None = None) -> int:
    """Run all loops; returns 1 when one costs more than the bar."""
    arguments = read_options(__doc__, words, rounds=3, steps=12)

    def run_loop(name: str) -> float:
        """The median step of one training, in ms."""
        steps_ms: list[float] = run_ranks(measure, name, arguments.steps, world=WORLD, group=False)[0]
        return median(steps_ms)

    medians = in_rounds(list(LOOPS), arguments.rounds, run_loop)
    ratios = {name: ratio(times, medians["plain loop"]) for name, times in medians.items()}
    rows = [[name, f"{median(times):.0f}", f"{ratios[name]:.3f}"] for name, times in medians.items()]
    title = "A step of a Llama of 20 M, 2 gloo ranks, stage 3"
    print(plain_table(title, ["loop", "ms", "of the plain loop"], rows))
    held = [bar_holds(f"{name} of the plain loop", ratios[name], BAR) for name in list(LOOPS)[1:]]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
