"""Workloads through `zerokit bench`: what trains, what is told beforehand, with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import zerokit
from zerokit.bench.record import read_record

MINE = """
import torch
from torch import nn
from zerokit.bench.workloads.own import Own

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x):
        print("forward of", len(x))
        return (self.inner(x)[:, 0] - x.sum(1)).square().mean()

def tiny():
    return Own(build=Net, batch=lambda generator, size: (torch.randn(size, 8, generator=generator),))
"""


def test_the_users_own_model_trains_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    options = (
        "--steps",
        "6",
        "--warmup",
        "1",
        "--lr",
        "0.1",
        "--batch-size",
        "16",
        "--nodes",
        "2",
        "--no-twin",
    )
    model = ("--model", "mine:tiny", "--output", "r.json")
    done = zerokit(tmp_path, "bench", "--no-mlflow", "--follow", *model, *options)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}: forward of 16\n" in done.stderr for rank in (0, 1))
    record = read_record(tmp_path / "r.json")
    assert record.model is not None
    assert (record.model.name, record.model.parameters, record.model.unit) == ("mine:tiny", 9, "samples")
    assert record.results is not None
    assert (record.results.loss_last or 9.0) < (record.results.loss_first or 0.0)
    assert "samples/s" in done.stdout


def test_what_is_too_large_is_a_result_told_at_once(tmp_path: Path) -> None:
    options = ("--model", "gpt3-175b", "--nodes", "2", "--device", "cpu", "--output", "r.json")
    done = zerokit(tmp_path, "bench", "--no-mlflow", *options)
    assert done.returncode == 4
    assert "gpt3-175b is too large" in done.stderr
    record = read_record(tmp_path / "r.json")
    assert record.status == "out of memory"
    assert "4Ψ + 12Ψ/N bytes" in (record.reason or "")
    assert record.ranks == []


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--model", "resnet-50"), 2, "did you mean resnet50"),
        (("--model", "nowhere.at_all:tiny"), 1, "no module 'nowhere' here or on the Python path"),
        (
            ("--model", "mlp-mnist", "--data", "nowhere"),
            1,
            "nowhere is no folder; image models take a folder",
        ),
        (("--model", "gpt2", "--seq-len", "1025"), 2, "seq_len 1025 exceeds the 1024 positions of gpt2"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: tuple[str, ...], code: int, message: str) -> None:
    done = zerokit(tmp_path, "bench", "--no-mlflow", "--output", "r.json", *options)
    assert message in done.stderr
    assert done.returncode == code
    assert not (tmp_path / "r.json").exists()
