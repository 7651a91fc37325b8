"""What commands need of the machine: a store of MLflow's, and a program ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that tests share, each with experiments of its own: making one takes seconds.

    There is nothing before the first bench.
    """
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="session", autouse=True)
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A program of that name where the machine has none: options are read, and nobody logs in."""
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("ssh") is None:
            program = tmp_path_factory.mktemp("programs") / "ssh"
            program.write_text("#!/bin/sh\nexit 255\n")
            program.chmod(0o755)
            patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield
