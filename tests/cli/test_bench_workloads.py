"""A model of the user's own through `zerokit bench`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import zerokit
from zerokit.bench.record.record import read_record

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
    options = [
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
    ]
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
