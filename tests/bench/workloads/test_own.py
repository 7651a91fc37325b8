"""The user's own workload: found without being run, refused in plain words, the same on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load
from zerokit.bench.workloads.inputs import check_inputs
from zerokit.bench.workloads.own import find, resolve
from zerokit.errors import UsageError

MINE = """
import torch
from torch import nn
from zerokit.bench.workloads.own import Own

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        return self.inner(x).square().mean()

class Picky(Net):
    def forward(self, x):
        return super().forward(x) * float(x.sum())  # impossible on meta

def draw(generator, size):
    return (torch.randn(size, 8, generator=generator),)

def tiny():
    return Own(build=Net, batch=draw)

def picky():
    return Own(build=Picky, batch=draw, unit="images", units_per_sample=2)

class Deep(Net):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]  # as timm's; impossible on meta, too

def deep():
    return Own(build=Deep, batch=draw)

def unparted():
    return Own(build=Net, batch=lambda generator, size: draw(generator, size)[0])

def wordy():
    return Own(build=Net, batch=draw, unit="words")

def wrong():
    return Net()

def broken():
    raise RuntimeError("no weights today")

class Several:
    tiny = staticmethod(tiny)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('looking for it must not run it')")
    (package / "part.py").touch()
    (tmp_path / "mine_for_tests.py").write_text(MINE)
    (tmp_path / "bad_for_tests.py").write_text("import what_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("mine_for_tests", "bad_for_tests"):
        sys.modules.pop(name, None)


def test_a_module_is_found_here_without_running_it(folder: Path) -> None:
    find("mine_for_tests:tiny")
    find("package_of_mine.part:anything")
    check_inputs(Settings(model="package_of_mine.part:anything"))
    assert "mine_for_tests" not in sys.modules


@pytest.mark.parametrize("module", ["nowhere_at_all", "package_of_mine.other", "mine_for_tests.part"])
def test_a_module_that_is_not_there_is_refused(folder: Path, module: str) -> None:
    with pytest.raises(UsageError, match=rf"no module '{module}' here or on the Python path"):
        check_inputs(Settings(model=f"{module}:tiny"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine_for_tests:absent", "mine_for_tests has no absent"),
        ("mine_for_tests:number", "number is a int, not a function"),
        ("mine_for_tests:wrong", r"wrong\(\) returned a Net: expected a workload"),
        (
            "mine_for_tests:wordy",
            "unit 'words', 1 of them a sample: expected tokens, images, samples, and a",
        ),
        ("mine_for_tests:broken", r"broken\(\) failed: RuntimeError: no weights today"),
        ("bad_for_tests:tiny", "importing bad_for_tests failed: ModuleNotFoundError"),
    ],
)
def test_a_factory_that_fails_is_named(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(name)


def test_weights_and_batches_depend_on_the_seed_alone(folder: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        loaded = load(Settings(model="mine_for_tests:Several.tiny", seed=seed))
        torch.manual_seed(torch.randint(100, ()).item())
        state = torch.random.get_rng_state()
        found = next(loaded.build().parameters()).detach()
        assert torch.equal(torch.random.get_rng_state(), state)
        return found

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    loaded = load(Settings(model="mine_for_tests:tiny", batch_size=5))
    (batch,) = loaded.batch(15)
    assert batch.shape == (5, 8)
    assert torch.equal(batch, loaded.batch(15)[0])
    assert not torch.equal(batch, loaded.batch(10)[0])
    assert loaded.build()(batch).ndim == 0
    assert loaded.init_fn is None


def test_what_the_record_says_of_it(folder: Path) -> None:
    model = load(Settings(model="mine_for_tests:tiny")).model
    assert (model.name, model.parameters) == ("mine_for_tests:tiny", 36)
    assert (model.unit, model.units_per_sample) == ("samples", 1)
    assert model.flops_per_unit == 2 * 2 * 8 * 4  # forward, and the weight's gradient: the input needs none
    picky = load(Settings(model="mine_for_tests:picky")).model
    assert (picky.unit, picky.units_per_sample, picky.flops_per_unit) == ("images", 2, None)
    assert (picky.flops_convention or "").startswith("not counted: ")
    deep = load(Settings(model="mine_for_tests:deep"))
    deep.build()
    assert (deep.model.parameters, deep.model.flops_per_unit) == (36, None)
    with pytest.raises(UsageError, match=r"batch\(\) returned a Tensor: expected a tuple of tensors"):
        load(Settings(model="mine_for_tests:unparted")).batch(0)
