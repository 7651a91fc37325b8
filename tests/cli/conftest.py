"""An MLflow store that tests share, each with experiments of its own: making one takes seconds."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where it is; there is nothing before the first bench."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
