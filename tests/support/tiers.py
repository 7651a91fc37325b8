"""The two tiers of the suite: the default one, and the full one that `--all` adds.

A test marked `full` belongs to the full tier, and so does one that makes a cluster. With
`@pytest.mark.full(default="gpt-2")` the parameters whose ids match stay in the default tier: one pattern of fnmatch, or
a list of them. The pattern "*" keeps the whole test there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

CLUSTERS = ("netns", "sshd", "slurm")
"""The markers of tests that make a cluster on this machine."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that were collected, of both tiers."""


def defaults(item: pytest.Item) -> list[str]:
    """The patterns of ids that the marker of a test leaves in the default tier."""
    marker = item.get_closest_marker("full")
    given = marker.kwargs.get("default", []) if marker else []
    return [given] if isinstance(given, str) else list(given)


def parameters(item: pytest.Item) -> str:
    """The id of a test's parameters, or nothing."""
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def in_cluster(item: pytest.Item) -> bool:
    """Whether a test makes a cluster."""
    return any(item.get_closest_marker(name) for name in CLUSTERS)


def is_full(item: pytest.Item) -> bool:
    """Whether a test belongs to the full tier."""
    marked = item.get_closest_marker("full") is not None or in_cluster(item)
    return marked and not any(fnmatchcase(parameters(item), pattern) for pattern in defaults(item))


def _named(config: pytest.Config) -> Iterator[str]:
    """The node ids of the command line, from the root: they may be given from another folder, or absolute."""
    for argument in config.args:
        file, colons, names = argument.partition("::")
        if colons:
            path = (config.invocation_params.dir / file).resolve()
            yield f"{os.path.relpath(path, config.rootpath)}::{names}"


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the tests of the full tier from `items`, except with `--all` and where a node id names the test."""
    config.stash[COLLECTED] = [*items]
    if config.getoption("--all"):
        return
    named = tuple(_named(config))
    left_out = [item for item in items if is_full(item) and not item.nodeid.startswith(named)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
