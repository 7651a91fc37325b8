"""Models of transformers and torchvision: their sizes, their weights, their losses, one training over ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.distributed import run_ranks
from zerokit.bench.catalogue.sizes import (
    BertConfig,
    Config,
    GPTConfig,
    InceptionConfig,
    LlamaConfig,
    ResNetConfig,
)
from zerokit.bench.catalogue.workloads import WORKLOADS, describe
from zerokit.bench.workloads.build import build_model
from zerokit.bench.workloads.initialise import init_module
from zerokit.bench.workloads.library import BatchNorm
from zerokit.errors import UsageError
from zerokit.placement import stage_of

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Config] = {
    "gpt": GPTConfig(vocabulary=300, positions=16, width=32, layers=2, heads=2),
    "llama": LlamaConfig(300, 16, 32, 2, 4, 2, 48, False, 10_000.0),
    "llama-tied": LlamaConfig(300, 16, 32, 2, 4, 4, 48, True, 10_000.0),
    "bert": BertConfig(300, 16, 32, 2, 2, 64),
    "resnet": ResNetConfig((1, 2, 1, 1), (16, 24, 32, 40), stem=8, classes=5),
}
LIBRARY = [name for name, workload in WORKLOADS.items() if workload.library == "transformers"]


def build_library(config: Config, *, seed: int) -> nn.Module:
    library = "torchvision" if isinstance(config, InceptionConfig) else "transformers"
    return build_model(config, library, seed=seed)


def batch_of(config: Config) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(config, ResNetConfig):
        return torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)
    tokens = torch.randint(0, 300, (4, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", [*LIBRARY, *SMALL])
def test_parameters_are_as_many_as_the_formula_says(name: str) -> None:
    config = SMALL.get(name) or describe(name).config
    assert config is not None
    with torch.device("meta"):
        model = build_library(config, seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize("name", SMALL)
def test_a_model_on_meta_gets_the_weights_and_buffers_of_one_in_memory(name: str) -> None:
    here = build_library(SMALL[name], seed=3)
    torch.manual_seed(5)  # nothing may depend on it
    with torch.device("meta"):
        there = build_library(SMALL[name], seed=3)
    there.to_empty(device="cpu")
    for module in reversed(list(there.modules())):  # in any order
        init_module(module)
    # `to_empty` unties weights, so that heads are compared as well.
    assert_equal(dict(here.state_dict()), dict(there.state_dict()))
    assert_equal(dict(here.named_buffers()), dict(there.named_buffers()))
    other = build_library(SMALL[name], seed=4)
    assert not all(torch.equal(*pair) for pair in zip(here.parameters(), other.parameters(), strict=True))


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize(("name", "kind"), [("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM")])
def test_buffers_are_those_that_the_library_itself_computes(name: str, kind: str) -> None:
    ours = build_library(SMALL[name], seed=0)
    inner = ours.get_submodule("model")
    theirs = getattr(transformers, kind)(inner.config)
    buffers = dict(inner.named_buffers())
    assert buffers
    assert_equal(buffers, dict(theirs.named_buffers()))


@pytest.mark.parametrize(
    ("name", "head", "table"),
    [
        ("gpt", "model.lm_head", "model.transformer.wte"),
        ("llama-tied", "model.lm_head", "model.model.embed_tokens"),
        ("bert", "model.cls.predictions.decoder", "model.bert.embeddings.word_embeddings"),
    ],
)
def test_a_tied_head_is_its_table(name: str, head: str, table: str) -> None:
    model = build_library(SMALL[name], seed=0)
    assert model.get_submodule(head).weight is model.get_submodule(table).weight


@pytest.mark.parametrize("name", SMALL)
def test_an_untrained_model_guesses_evenly_and_learns(name: str) -> None:
    config = SMALL[name]
    model, batch = build_library(config, seed=0), batch_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not isinstance(config, ResNetConfig):
        assert losses[0] == pytest.approx(math.log(300), abs=0.2)
    assert losses[-1] < losses[0] - 0.3
    assert loss.dtype is torch.float32


def test_nothing_is_random_in_a_forward_pass() -> None:
    """Dropout would make engines and ranks differ."""
    for config in SMALL.values():
        model, batch = build_library(config, seed=0), batch_of(config)
        assert model.training
        assert model(*batch).item() == model(*batch).item()


def test_half_precision_images_meet_statistics_in_fp32() -> None:
    model = build_library(SMALL["resnet"], seed=0)
    images, labels = batch_of(SMALL["resnet"])
    exact = model(images, labels).item()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    before = next(module for module in model.modules() if isinstance(module, BatchNorm)).running_var
    assert before is not None
    assert before.dtype is torch.float32
    assert model(images.bfloat16(), labels).item() == pytest.approx(exact, rel=0.05)


TRAINED, STAGES = ("bert", "resnet"), (0, 3)


def train() -> dict[str, list[list[float]]]:
    """Losses of three steps by workload and stage; all in one process, since importing the library takes seconds."""
    return {name: [train_at(stage, name) for stage in STAGES] for name in TRAINED}


def train_at(stage: int, name: str) -> list[float]:
    import torch.distributed as dist

    from zerokit import ZeroOptimizer

    config = SMALL[name]
    with torch.device("meta"):
        model = build_library(config, seed=1)
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32", init_fn=init_module, lr=1e-3
    )
    mine = share(config, dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(*mine)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def share(config: Config, rank: int) -> list[Tensor]:
    return [tensor[2 * rank : 2 * rank + 2] for tensor in batch_of(config)]


def test_ranks_train_from_meta_as_one_process_begins_and_alike_at_every_stage() -> None:
    for rank, found in enumerate(run_ranks(2, train)):
        for name in TRAINED:
            assert found[name][0] == found[name][1]
            alone = build_library(SMALL[name], seed=1)(*share(SMALL[name], rank))
            assert found[name][0][0] == pytest.approx(alone.item(), rel=1e-5)


def test_inception_is_built_where_torchvision_is_installed() -> None:
    pytest.importorskip("torchvision")
    config = InceptionConfig(classes=7)
    with torch.device("meta"):
        model = build_library(InceptionConfig(), seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == InceptionConfig().parameters
    small = build_library(config, seed=0)
    assert sum(parameter.numel() for parameter in small.parameters()) == config.parameters
    assert not [module for module in small.modules() if isinstance(module, nn.Dropout) and module.p]
    loss = small(torch.randn(2, 3, 299, 299), torch.tensor([1, 2]))
    loss.backward()
    assert math.isfinite(loss.item())
    assert replace(config, classes=1000) == InceptionConfig()


def test_a_torchvision_of_another_torch_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(
        UsageError, match=r"does not work with this torch \(operator torchvision::nms does not exist\)"
    ):
        build_library(InceptionConfig(), seed=0)
