"""One MLflow store for all tests of a module: making one takes seconds, and each test has its own experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerokit.bench.tracking.store import Tracking

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory meanwhile: MLflow puts artifacts there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("mlflow"))
        yield folder


@pytest.fixture(scope="module")
def uri(place: Path) -> str:
    """Absolute: MLflow keeps what it has opened by URI, also when tests of this module are run in several parts."""
    return f"sqlite:///{place}/mlflow.db"


@pytest.fixture
def tracking(uri: str, request: pytest.FixtureRequest) -> Tracking:
    return Tracking(uri, f"{request.module.__name__} {request.node.name}")


@pytest.fixture
def client(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)
