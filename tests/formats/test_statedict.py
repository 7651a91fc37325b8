"""Files of `torch.save` with a state dict, as programs with DDP write them: weights alone, and nothing is executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks
from zerokit.checkpoint.formats import open_source
from zerokit.errors import CheckpointError


class Net(nn.Module):
    """Tied weights, a buffer of integers and one of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.table(x)))
        return found


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(model: nn.Module) -> dict[str, Tensor]:
    """The names that DDP gives."""
    return {f"module.{name}": tensor for name, tensor in model.state_dict().items()}


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda model: model.state_dict(),
    "ddp": wrapped,
    "member": lambda model: {"epoch": 3, "model": wrapped(model), "ema": net(9).state_dict()},
    "lightning": lambda model: {"state_dict": model.state_dict(), "optimizer_states": [{"state": {}}]},
    "compiled": lambda model: {f"_orig_mod.{name}": one for name, one in model.state_dict().items()},
    "odd": lambda model: {"net": model.state_dict(), "lr": 0.1},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*not carried over:zerokit.ZerokitWarning")
def test_weights_of_every_form_become_a_folder_for_hugging_face(tmp_path: Path, form: str) -> None:
    model = net(0)
    torch.save(FORMS[form](model), tmp_path / "last.pt")
    source = open_source(tmp_path / "last.pt")
    assert (source.format, source.world, source.weights_only) == ("torch", 1, True)
    assert zerokit.verify(tmp_path / "last.pt").intact
    written = zerokit.consolidate(tmp_path / "last.pt", tmp_path / "model")
    expected = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    found = load_file(written / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert zerokit.diff(tmp_path / "last.pt", written).same


def _load(path: str) -> bool:
    model, expected = net(1), net(0)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=0.1)
    zerokit.load(path, optimizer, weights_only=True)
    held = model.state_dict()
    return all(torch.equal(held[name], one) for name, one in expected.state_dict().items())


def test_ranks_load_the_weights_of_ddp(tmp_path: Path) -> None:
    torch.save(FORMS["ddp"](net(0)), tmp_path / "last.pt")
    assert run_ranks(2, _load, str(tmp_path / "last.pt")) == [True, True]


class Evil:
    """Says that it was executed, when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_what_is_no_state_dict_is_told_and_nothing_runs(tmp_path: Path) -> None:
    model, (path, proof) = net(0), (tmp_path / "last.pt", tmp_path / "executed")
    for value, message in (
        (model, "holds an object, not a state dict: save model.state_dict\\(\\)"),
        ({"a": Evil(proof), "model": Evil(proof)}, "has no tensors by name, expected model.state_dict"),
        ([1], "holds a list"),
        ({"one": model.state_dict(), "two": model.state_dict()}, "has state dicts 'one', 'two'"),
        (
            {"weight": torch.ones(2), "other": Evil(proof)},
            "other is a pathlib.*: save a plain tensor|plain tensor",
        ),
        ({"weight": torch.ones(4, 4).t()[:, :2]}, "weight: stored with strides"),
    ):
        torch.save(value, path)
        with pytest.raises(CheckpointError, match=message):
            open_source(path)
    assert not proof.exists()
    path.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
        open_source(path)
    torch.save(model.state_dict(), tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="a part of a DeepSpeed checkpoint: give the directory"):
        open_source(tmp_path / "mp_rank_00_model_states.pt")


def test_a_changed_byte_is_damage(tmp_path: Path) -> None:
    torch.save(net(0).state_dict(), tmp_path / "last.pt")
    content = bytearray((tmp_path / "last.pt").read_bytes())
    place = content.index(net(0).table.weight.detach().numpy().tobytes())
    content[place] ^= 1
    (tmp_path / "last.pt").write_bytes(content)
    assert not zerokit.verify(tmp_path / "last.pt").intact
    with pytest.raises(CheckpointError):
        zerokit.consolidate(tmp_path / "last.pt", tmp_path / "model")
    assert not (tmp_path / "model").exists()
