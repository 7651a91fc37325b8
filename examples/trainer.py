"""Train a tiny Llama with transformers' Trainer and ZeRO stage 3, go on from a checkpoint, and load the result.

    torchrun --nproc-per-node 2 examples/trainer.py [DIRECTORY]

Nothing is downloaded: the model is built from a configuration, the text is this file. Checkpoints and the model go to
DIRECTORY, by default runs/trainer. Needs `pip install 'zerokit[hf]'`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainingArguments,
)

from zerokit.integrations.transformers import ZeroTrainer

LENGTH = 32


def build() -> LlamaForCausalLM:
    """A Llama over bytes, the same on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # bytes
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def samples() -> list[dict[str, torch.Tensor]]:
    """This file, cut into rows of `LENGTH` bytes."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    cut = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in cut]


def train(directory: str, steps: int, checkpoint: str | None = None) -> ZeroTrainer:
    """Train to `steps`, from the beginning or from a checkpoint."""
    cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        directory,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=5,
        lr_scheduler_type="constant_with_warmup",
        save_steps=10,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
    )
    trainer = ZeroTrainer(build(), args, train_dataset=samples(), stage=3)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def main(directory: str) -> None:
    """Ten steps, ten more from the checkpoint, and the result as Hugging Face loads it."""
    first = train(directory, 10)
    trainer = train(directory, 20, f"{directory}/checkpoint-10")
    trainer.save_model(f"{directory}/model")
    if trainer.is_world_process_zero():
        before, after = (t.state.log_history[-2]["loss"] for t in (first, trainer))
        print(f"loss {before:.3f} over the first 10 steps, {after:.3f} over the next 10")
        assert trainer.zero_optimizer is not None
        print(f"model state of this rank: {trainer.zero_optimizer.memory().total / 1e3:.0f} kB")
        loaded = AutoModelForCausalLM.from_pretrained(f"{directory}/model")
        print(f"loaded again: {type(loaded).__name__}, {loaded.num_parameters()} parameters")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/trainer")
