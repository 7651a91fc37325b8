"""The package's surface: its names resolve, and importing it costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import zerokit
from zerokit.text import without_secrets

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", zerokit.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(zerokit, name) is not None
    assert name in dir(zerokit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ZeroOptimiser'"):
        _ = zerokit.ZeroOptimiser  # type: ignore[attr-defined]


def test_a_misspelt_precision_is_an_error_of_types_and_of_use() -> None:
    """mypy finds the first: without it the comment below would be one that is not needed, which is an error."""
    model = torch.nn.Linear(1, 1)
    with pytest.raises(
        zerokit.UsageError, match="precision 'bf17' is unknown: choose 'fp32', 'bf16' or 'fp16'"
    ):
        zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=0, precision="bf17")  # type: ignore[arg-type]


def test_every_error_is_a_zerokit_error() -> None:
    errors = [getattr(zerokit, name) for name in zerokit.__all__]
    kinds = [error for error in errors if isinstance(error, type) and issubclass(error, Exception)]
    kinds.remove(zerokit.ZerokitWarning)
    assert len(kinds) >= 6
    assert all(issubclass(kind, zerokit.ZerokitError) for kind in kinds)


@pytest.mark.parametrize("module", ["zerokit", "zerokit.errors", "zerokit.layout", "zerokit.cli"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'mlflow', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_every_dependency_is_pinned() -> None:
    pins = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        needed += extra
    names = {re.split(r"[<>=!~ \[]", requirement)[0].lower() for requirement in needed}
    assert names - {"zerokit"} <= pins  # an extra may name another one


def test_secrets_of_uris_are_not_shown() -> None:
    for uri, shown in (
        ("postgresql+psycopg2://me:p@ss:w@host:5432/runs", "postgresql+psycopg2://***@host:5432/runs"),
        ("see http://me:s3cret@host/a and ftp://x/y@z", "see http://***@host/a and ftp://x/y@z"),
        ("mysql://host/db?user=me&password=s3cret&ssl=1", "mysql://host/db?user=me&password=***&ssl=1"),
        ("postgresql://u:pa/s?s#1@h/db", "postgresql://***@h/db"),
        ("postgresql://h/db?sslpassword=s3cret", "postgresql://h/db?sslpassword=***"),
        ("mssql://?odbc_connect=PWD%3Ds3cret", "mssql://?odbc_connect=***"),
        ("http://host:5000/#/experiments/1", "http://host:5000/#/experiments/1"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ):
        assert without_secrets(uri) == shown


_LEAN = """
import sys
for name in ("altair", "mlflow", "pynvml", "scipy", "vl_convert", "yaml"):
    sys.modules[name] = None
import torch
import torch.distributed as dist
from click.testing import CliRunner
import zerokit
from zerokit.cli import cli
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
model = torch.nn.Linear(8, 8)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=1e-3)
optimizer.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
zerokit.save(f"{folder}/run", optimizer, step=1)
zerokit.load(f"{folder}/run", optimizer)
for words in ("inspect RUN", "verify RUN", "reshard RUN --to 3 --output RUN-3", "consolidate RUN --output RUN-1",
              "diff RUN RUN-3", "prune RUN --keep-last 1"):
    done = CliRunner().invoke(cli, words.replace("RUN", f"{folder}/run").split())
    assert done.exit_code == 0, (words, done.output)
"""


def test_training_and_checkpoints_need_a_few_packages_alone(tmp_path: Path) -> None:
    """What docs/install.md lists for a lean container is enough: benches, pages and trackers need the rest."""
    (line,) = re.findall(
        r"pip install --no-deps \. && pip install (.*?)`", (ROOT / "docs" / "install.md").read_text()
    )
    assert set(line.split()) == {"torch", "numpy", "safetensors", "zlib-ng", "click", "rich"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _LEAN, str(tmp_path)], check=True)
