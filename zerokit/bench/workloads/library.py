"""Models from the configurations of transformers and torchvision, with random weights: nothing is downloaded.

Dropout is off, so that every engine computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zerokit.bench.catalogue.workloads import (
    INSTALL,
    BertConfig,
    Config,
    GPTConfig,
    InceptionConfig,
    LlamaConfig,
    ResNetConfig,
)
from zerokit.bench.workloads.models import DEFAULT_STD, set_rotary_base, set_std
from zerokit.errors import UsageError

# The weight of the auxiliary classifier's loss in torchvision's own training script for this model.
_AUXILIARY = 0.4


# What transformers calls our sizes; GPT-2's configuration takes these names for its own as well.
_SIZES = {
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "types": "type_vocab_size",
    "depths": "depths",
    "widths": "hidden_sizes",
    "stem": "embedding_size",
    "channels": "num_channels",
    "classes": "num_labels",
}
_TEXT = {"use_cache": False, "attn_implementation": "sdpa"}
_DECODER = {**_TEXT, "bos_token_id": None, "eos_token_id": None}
# Its classes of configuration and model, and the options that are no sizes.
_CLASSES: Mapping[type[Config], tuple[str, str, dict[str, Any]]] = {
    GPTConfig: (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_DECODER},
    ),
    LlamaConfig: ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    BertConfig: (
        "BertConfig",
        "BertForMaskedLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **_TEXT},
    ),
    ResNetConfig: ("ResNetConfig", "ResNetForImageClassification", {}),
}


class WithLoss(nn.Module):
    """A wrapper of a library's model that returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in fp32; targets of −100 are ignored.

        Args:
            inputs: tokens (batch, length) or images (batch, channels, size, size).
            targets: tokens (batch, length) or labels (batch,).
        """
        output = self.model(inputs)
        logits, auxiliary = output.logits, getattr(output, "aux_logits", None)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        return loss if auxiliary is None else loss + _AUXILIARY * F.cross_entropy(auxiliary.float(), targets)


class BatchNorm(nn.BatchNorm2d):
    """Torch's BatchNorm, with parameters in half precision and statistics in fp32.

    Torch takes half-precision images then, but not half-precision weights beside fp32 statistics.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None or self.weight.dtype == variance.dtype or not self.training:
            return super().forward(input)
        weight, bias = self.weight.to(variance.dtype), self.bias.to(variance.dtype)
        return F.batch_norm(input, mean, variance, weight, bias, True, self.momentum or 0.0, self.eps)


def make_library(config: Config) -> nn.Module:
    """The model of a library's configuration, without pretrained weights."""
    model = WithLoss(_inception(config) if isinstance(config, InceptionConfig) else _transformer(config))
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNorm
        elif isinstance(module, nn.Conv2d):  # He's spread, for what a ReLU follows
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            set_std(module, math.sqrt(2.0 / fan_out))
        elif isinstance(config, GPTConfig) and name.endswith("c_proj"):  # as in `models.Block`
            set_std(module, DEFAULT_STD / math.sqrt(2 * config.layers))
        elif isinstance(config, LlamaConfig):
            set_rotary_base(module, config.rotary_base)
    return model


def _transformer(config: Config) -> nn.Module:
    import transformers

    configuration, kind, options = _CLASSES[type(config)]
    for ours, value in asdict(config).items():
        if ours in _SIZES:
            options = {**options, _SIZES[ours]: list(value) if isinstance(value, tuple) else value}
    made: nn.Module = getattr(transformers, kind)(getattr(transformers, configuration)(**options))
    return made


def _inception(config: InceptionConfig) -> nn.Module:
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        # One for another version or build of torch can be installed, and fails only here.
        raise UsageError(
            f"torchvision does not work with this torch ({error}); {INSTALL['torchvision']}"
        ) from error
    # Its own initialisation is slow and depends on the order of modules.
    made: nn.Module = torchvision.models.inception_v3(
        weights=None, num_classes=config.classes, aux_logits=True, init_weights=False, dropout=0.0
    )
    return made
