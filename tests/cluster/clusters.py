"""What the tests on clusters share: the bench they run, and what every launcher leaves in MLflow."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ZEROKIT = [sys.executable, "-m", "zerokit"]
MODEL = ["bench", "--model", "gpt-tiny", "--seq-len", "16", "--warmup", "1", "--no-twin", "--json"]
SHORT = [*MODEL, "--steps", "4"]
LONG = [*MODEL, "--steps", "100000", "--no-mlflow"]


def logged_runs(folder: Path) -> list[Any]:
    """The MLflow runs that benches in `folder` logged by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, at every release of what it builds on
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return list(client.search_runs(experiments))


def start(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """A command whose output is kept."""
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, out + err
    return out
