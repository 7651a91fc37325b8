"""Lets ranks start with the libraries loaded: importing them takes each rank longer than most of these tests."""

import pytest

from tests.support import distributed


@pytest.fixture(autouse=True, scope="package")
def _libraries() -> None:
    distributed.preload(distributed.LIBRARIES)
