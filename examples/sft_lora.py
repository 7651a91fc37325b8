"""Fine-tune a Llama by TRL's SFTTrainer with a LoRA adapter of PEFT, at ZeRO stage 3, and load the adapter again.

    torchrun --nproc-per-node 2 examples/sft_lora.py [DIRECTORY]

Nothing is downloaded: model and tokenizer are made here. The adapter goes to DIRECTORY, by default runs/sft_lora. Needs
`pip install 'zerokit[hf]' trl peft`.
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

from zerokit.integrations.transformers import ZeroTrainer

TEXT = "zero divides optimizer states gradients and parameters among all ranks"
WORDS = ["<pad>", "<eos>", "<unk>", *TEXT.split()]


class ZeroSFTTrainer(ZeroTrainer, SFTTrainer):
    """Any trainer of TRL combines with `ZeroTrainer`, which comes first."""


def build() -> LlamaForCausalLM:
    """A pretrained model in practice; the same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def main(directory: str) -> None:
    """Thirty steps; then the adapter, loaded into the base again, predicts as the trained model does."""
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames what TRL sets
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    cpu = not torch.cuda.is_available()
    args = SFTConfig(
        directory,
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=cpu,
        bf16=not cpu,
        dataloader_pin_memory=not cpu,
    )
    trainer = ZeroSFTTrainer(
        build(),
        args=args,
        train_dataset=Dataset.from_dict({"text": [TEXT] * 64}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        stage=3,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(directory)  # all ranks call it: they hold the weights together

    ids = torch.arange(3, len(WORDS))[None].to(trainer.args.device)
    model: Any = trainer.model
    model.eval()
    with torch.no_grad():
        trained = model(input_ids=ids).logits
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        loaded = PeftModel.from_pretrained(build(), directory).to(ids.device).eval()
        with torch.no_grad():
            close = torch.allclose(
                loaded(input_ids=ids).logits.float(), trained.float(), atol=1e-4 if cpu else 1e-1
            )
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"the adapter in {directory}, loaded by PEFT, predicts the same: {close}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/sft_lora")
