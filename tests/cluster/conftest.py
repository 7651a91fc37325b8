"""Launches are tried as those on this machine are."""

from __future__ import annotations

from tests.launch.conftest import logs

__all__ = ["logs"]
