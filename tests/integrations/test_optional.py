"""What is to be installed is said where it is missing, and nothing else needs it."""

from __future__ import annotations

import re

import pytest

from tests.support.distributed import ROOT, run_alone


def _without_lightning() -> str:
    import sys

    for name in ("lightning", "pytorch_lightning"):
        sys.modules[name] = None  # type: ignore[assignment]
    with pytest.raises(ImportError) as raised:
        import zerokit.integrations.lightning  # noqa: F401
    return str(raised.value)


def test_without_lightning_the_import_says_what_to_install() -> None:
    assert "pip install pytorch-lightning" in run_alone(_without_lightning)


def test_nothing_outside_imports_an_integration() -> None:
    for path in (ROOT / "zerokit").rglob("*.py"):
        if "integrations" not in path.parts:
            imports = re.findall(r"^\s*(?:from|import) zerokit\.integrations", path.read_text(), re.MULTILINE)
            assert imports == [], path
