"""TRL's trainers combined with `ZeroTrainer`, beside the same trainers with DDP; model and tokens are made here."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.integrations.launched import as_launched
from tests.integrations.trainers import VOCABULARY, arguments, build
from tests.support.on_ranks import on_ranks
from zerokit.integrations.transformers import ZeroTrainer


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("kind", ["SFT", "DPO", "DPO with an adapter"])
@on_ranks(2)
def test_trainers_of_trl_lose_as_with_ddp(kind: str, tmp_path: Path) -> None:
    as_launched()
    warnings.simplefilter("ignore", FutureWarning)  # TRL's defaults have names that transformers renames
    import trl
    from datasets import Dataset

    kind, _, alone = kind.partition(" ")
    plain = getattr(trl, f"{kind}Trainer")
    zero = type(f"Zero{kind}Trainer", (ZeroTrainer, plain), {})
    lines = [f"w{3 + row} w4 w{5 + row} w6" for row in range(8)]
    columns = {"text": lines}
    if kind == "DPO":
        columns = {"prompt": lines, "chosen": ["w3 w4"] * 8, "rejected": ["w5 w6"] * 8}
    found = []
    for stage in (None, 0, 3):
        changes: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "warmup_steps": 0}
        args = arguments(tmp_path, kind=getattr(trl, f"{kind}Config"), max_steps=3, **changes)
        options: dict[str, Any] = {
            "train_dataset": Dataset.from_dict(columns),
            "processing_class": _tokenizer(),
        }
        if alone:  # the reference is the model without its adapter
            from peft import LoraConfig

            options["peft_config"] = LoraConfig(target_modules="all-linear", init_lora_weights=False)
            torch.manual_seed(0)
        elif kind == "DPO":
            options["ref_model"] = build()
        trainer, given = (plain, {}) if stage is None else (zero, {"stage": stage})
        made = trainer(build(), args=args, **options, **given)
        made.train()
        found.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    plain_losses, *divided = found
    assert len(set(plain_losses)) == 3
    for losses in divided:
        assert losses == pytest.approx(plain_losses, rel=1e-5)
