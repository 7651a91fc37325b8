"""What is to be installed is said where it is missing."""

from __future__ import annotations

import pytest

from tests.support.distributed import run_alone


def _without_lightning() -> str:
    import sys

    for name in ("lightning", "pytorch_lightning"):
        sys.modules[name] = None  # type: ignore[assignment]
    with pytest.raises(ImportError) as raised:
        import zerokit.integrations.lightning  # noqa: F401
    return str(raised.value)


def test_without_lightning_the_import_says_what_to_install() -> None:
    assert "pip install pytorch-lightning" in run_alone(_without_lightning)
