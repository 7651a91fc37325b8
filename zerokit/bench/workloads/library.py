"""Models from the configurations of transformers and torchvision, with random weights: nothing is downloaded.

They are made on meta, whose construction costs nothing, and get memory and weights afterwards: a library's own random
weights would depend on the order in which modules are made. Dropout is off, so that every engine computes the same.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerokit.bench.catalogue.sizes import (
    BertConfig,
    Config,
    GPTConfig,
    InceptionConfig,
    LlamaConfig,
    ResNetConfig,
    TextConfig,
)
from zerokit.bench.catalogue.workloads import INSTALL
from zerokit.bench.workloads.initialise import DEFAULT_STD, default_device, init_module, name_modules, set_std
from zerokit.errors import UsageError

# Of the auxiliary classifier's loss, as torchvision's own training script for this model weighs it.
_AUXILIARY = 0.4


class Language(nn.Module):
    """A language model, causal or masked, that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in fp32; tokens and targets (batch, length), targets of −100 do not count."""
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Classifier(nn.Module):
    """A classifier of images that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy in fp32; images (batch, channels, size, size), labels (batch,)."""
        output = self.model(images)
        loss = F.cross_entropy(output.logits.float(), labels)
        auxiliary = getattr(output, "aux_logits", None)
        return loss if auxiliary is None else loss + _AUXILIARY * F.cross_entropy(auxiliary.float(), labels)


class BatchNorm(nn.BatchNorm2d):
    """Torch's, in a model whose parameters are in half precision and whose statistics stay in fp32.

    Torch takes half-precision images then, but not half-precision weights beside fp32 statistics.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None or self.weight.dtype == variance.dtype or not self.training:
            return super().forward(input)
        weight, bias = self.weight.to(variance.dtype), self.bias.to(variance.dtype)
        return F.batch_norm(input, mean, variance, weight, bias, True, self.momentum or 0.0, self.eps)


def build_library(config: Config, *, seed: int) -> nn.Module:
    """The model of `config`, on the device that `torch.device` as a context asks for ("meta" too)."""
    device = default_device()
    with torch.device("meta"):
        model = _make(config)
        _replace_norms(model)
    for name, module in model.named_modules():
        _choose_std(config, name, module)
    name_modules(model, seed)
    if device.type != "meta":
        _materialise(model, device)
        fill = init_library(config)
        for module in model.modules():
            fill(module)
    return model


def init_library(config: Config) -> partial[None]:
    """What initialises one module of such a model in place, its buffers as well."""
    return partial(_fill, config)


def _make(config: Config) -> nn.Module:
    match config:
        case GPTConfig() | LlamaConfig() | BertConfig():
            return Language(_language_model(config))
        case ResNetConfig():
            import transformers

            labels: dict[str, Any] = {"num_labels": config.classes}
            asked = transformers.ResNetConfig(
                num_channels=config.channels,
                embedding_size=config.stem,
                hidden_sizes=list(config.widths),
                depths=list(config.depths),
                **labels,
            )
            return Classifier(transformers.ResNetForImageClassification(asked))
        case InceptionConfig():
            torchvision = _torchvision()
            # Its own initialisation is slow and depends on the order of modules.
            made = torchvision.models.inception_v3(
                weights=None, num_classes=config.classes, aux_logits=True, init_weights=False, dropout=0.0
            )
            return Classifier(made)
        case _:
            raise AssertionError(f"{config} is built by no library")


def _torchvision() -> Any:
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        # Of another torch's version or build it is found, and fails only here.
        raise UsageError(
            f"torchvision does not work with this torch ({error}); {INSTALL['torchvision']}"
        ) from error
    return torchvision


def _language_model(config: TextConfig) -> nn.Module:
    import transformers

    same: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    match config:
        case GPTConfig():
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_positions=config.positions,
                    n_embd=config.width,
                    n_layer=config.layers,
                    n_head=config.heads,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    bos_token_id=None,
                    eos_token_id=None,
                    **same,
                )
            )
        case LlamaConfig():
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    max_position_embeddings=config.positions,
                    hidden_size=config.width,
                    intermediate_size=config.hidden,
                    num_hidden_layers=config.layers,
                    num_attention_heads=config.heads,
                    num_key_value_heads=config.key_value_heads,
                    rms_norm_eps=config.norm_epsilon,
                    tie_word_embeddings=config.tied,
                    bos_token_id=None,
                    eos_token_id=None,
                    **same,
                )
            )
        case BertConfig():
            return transformers.BertForMaskedLM(
                transformers.BertConfig(
                    max_position_embeddings=config.positions,
                    type_vocab_size=config.types,
                    hidden_size=config.width,
                    intermediate_size=config.hidden,
                    num_hidden_layers=config.layers,
                    num_attention_heads=config.heads,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                    **same,
                )
            )


def _replace_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d:
                setattr(module, name, BatchNorm(child.num_features, child.eps, child.momentum))


def _choose_std(config: Config, name: str, module: nn.Module) -> None:
    """The usual spread: He's for what a ReLU follows, and GPT-2's for what is added to the residual (two a layer)."""
    if isinstance(module, nn.Conv2d):
        set_std(
            module, math.sqrt(2.0 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
        )
    elif isinstance(config, GPTConfig) and name.endswith("c_proj"):
        set_std(module, DEFAULT_STD / math.sqrt(2 * config.layers))


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer that is on meta memory on `device`; what is tied stays tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    memory = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(memory, parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def _fill(config: Config, module: nn.Module) -> None:
    init_module(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return
    for name, buffer in module.named_buffers(recurse=False):
        match name:
            case "position_ids":
                buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device).expand_as(buffer))
            case "token_type_ids":
                buffer.zero_()
            case "inv_freq" | "original_inv_freq":
                assert isinstance(config, LlamaConfig)
                half = torch.arange(0, 2 * len(buffer), 2, dtype=torch.float32, device=buffer.device)
                buffer.copy_(1.0 / config.rotary_base ** (half / (2 * len(buffer))))
            case "bias":  # the causal mask of GPT-2 in transformers 4
                buffer.copy_(torch.ones_like(buffer).tril())
            case "masked_bias":  # and what it puts in place of the future
                buffer.fill_(-1e4)
            case _:
                raise AssertionError(
                    f"{type(module).__name__}.{name}: a buffer whose values are not known here"
                )
