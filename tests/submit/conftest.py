"""Programs in PATH that stand for a queue's."""

from __future__ import annotations

from tests.support.programs import programs as programs
