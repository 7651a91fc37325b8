"""What the tests on clusters share: the bench they run, and what every launcher leaves in MLflow."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ZEROKIT = [sys.executable, "-m", "zerokit.cli"]
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
