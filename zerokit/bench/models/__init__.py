"""The built-in models: `configs` names and sizes them (standard library only), `gpt` and `llama` build them.

`build(name)` imports torch; everything else here does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerokit.bench.models.configs import MODELS, GPTConfig, LlamaConfig

if TYPE_CHECKING:
    from zerokit.bench.models.gpt import GPT
    from zerokit.bench.models.llama import Llama

__all__ = ["MODELS", "GPTConfig", "LlamaConfig", "build"]


def build(config: GPTConfig | LlamaConfig, *, seed: int = 0) -> GPT | Llama:
    """The model of `config`, on the device that `torch.device` as a context asks for ("meta" too).

    Built on meta, pass `init_fn=model.init_module` to `ZeroOptimizer`; the weights are then the same as those
    of a model built in memory with the same seed.
    """
    if isinstance(config, GPTConfig):
        from zerokit.bench.models.gpt import GPT

        return GPT(config, seed=seed)
    from zerokit.bench.models.llama import Llama

    return Llama(config, seed=seed)
