"""What launches of `workload` need, and programs in PATH that stand for a cluster's."""

from __future__ import annotations

from tests.launch.conftest import logs as logs
from tests.support.programs import programs as programs
