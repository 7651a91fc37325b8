"""Which parameters of a model Muon trains, and that FSDP2's shards are trained as whole matrices are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.distributed import run_ranks
from zerokit.bench.engines.fsdp2 import TRAINS_ON_CPU, FullTensorMuon
from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load
from zerokit.errors import UsageError

MUON = Settings(model="gpt-tiny", optimizer="muon", device="cpu", seq_len=16, data=str(Path(__file__)))


def names_of(model: nn.Module, settings: Settings) -> list[tuple[str, list[str]]]:
    """The names of the classes and of their parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        (share.optimizer_class.__name__, [names[parameter] for parameter in share.parameters])
        for share in shares_of(model, settings)
    ]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_muon_trains_the_matrices_of_blocks_and_adamw_all_else(name: str) -> None:
    model = load(Settings(model=name, seq_len=16, data="synthetic")).build()
    (_, matrices), (_, rest) = found = names_of(model, MUON)
    assert [one for one, _ in found] == ["Muon", "AdamW"]
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    assert matrices == [name for name, ndim in shapes.items() if ndim == 2 and name.startswith("blocks.")]
    assert len(matrices) >= 8
    assert sorted([*matrices, *rest]) == sorted(shapes)  # a tied head once
    (everything,) = names_of(model, Settings(model=name))
    assert everything == ("AdamW", list(shapes))


class Mixed(nn.Module):
    """What is no matrix of a block: embeddings in blocks, convolutions, frozen matrices, and the head."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.biases, block.conv = nn.Embedding(4, 2), nn.Conv2d(3, 4, 2)
        block.first, block.frozen = nn.Linear(3, 5), nn.Linear(5, 3)
        block.frozen.requires_grad_(False)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([block])
        self.head = nn.Linear(3, 2)


def test_embeddings_convolutions_and_frozen_matrices_are_not_muons() -> None:
    (_, matrices), (_, rest) = names_of(Mixed(), MUON)
    assert matrices == ["encoder.layers.0.first.weight"]
    assert "encoder.layers.0.biases.weight" in rest
    assert "encoder.layers.0.conv.weight" in rest
    assert not any("frozen" in name for name in rest)


def test_a_model_without_blocks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"mine:net has no matrices that Muon could train.*--optimizer adamw"
    ):
        shares_of(nn.Sequential(nn.Linear(2, 3)), Settings(model="mine:net", optimizer="muon"))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UsageError, match=r"has no torch.optim.Muon: install torch 2.9 or later"):
        shares_of(Mixed(), MUON)


def weights_after(nesterov: bool, mesh: dict[str, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """On a rank: weights after four steps of `FullTensorMuon` on shards, and of torch's class on whole matrices."""
    found = []
    for optimizer_class in (FullTensorMuon, torch.optim.Muon):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))
        if optimizer_class is FullTensorMuon:
            device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            fully_shard(model, mesh=device_mesh)
        matrices = list(model.parameters())[:2]
        optimizer = optimizer_class(
            matrices, lr=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", weight_decay=0.2
        )
        for step in range(4):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
            model.zero_grad()
        found.append([one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in matrices])
    return found[0], found[1]


@pytest.mark.skipif(not TRAINS_ON_CPU, reason="torch 2.6's FSDP2 needs a GPU")
@pytest.mark.parametrize(
    ("nesterov", "mesh"), [(True, {"shard": 2}), (False, {"shard": 3}), (True, {"replicate": 2, "shard": 2})]
)
def test_shards_are_trained_as_whole_matrices_are(nesterov: bool, mesh: dict[str, int]) -> None:
    for own, expected in run_ranks(math.prod(mesh.values()), weights_after, nesterov, mesh):
        for one, other in zip(own, expected, strict=True):
            # Muon rounds to bf16: a sum in another order may move an element by a step of 2^-8.
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)
