"""The default tier has a test of each file, and the nightly workflow runs both tiers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import tiers

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github/workflows"
CLUSTER = "tests/checkpoint/nodes/test_remote.py::test_real_machines"
"""The test that makes a cluster in the default tier."""


def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests of both tiers; a run of single tests by their node ids has only these, and skips such checks."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("needs whole files of tests")
    return request.config.stash[tiers.COLLECTED]


def test_each_file_has_a_test_in_the_default_tier(request: pytest.FixtureRequest) -> None:
    files = defaultdict(list)
    for item in collected(request):
        files[item.path].append(item)
    full = {path for path, items in files.items() if all(map(tiers.is_full, items))}
    assert {str(path) for path in full if not all(map(tiers.in_cluster, files[path]))} == set()


def test_clusters_belong_to_the_full_tier_but_one(request: pytest.FixtureRequest) -> None:
    file, _, name = CLUSTER.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()
    clusters = [item for item in collected(request) if tiers.in_cluster(item)]
    kept = {item.nodeid for item in clusters if not tiers.is_full(item)}
    assert kept == {CLUSTER} & {item.nodeid for item in clusters}


def test_each_pattern_of_a_marker_matches_parameters(request: pytest.FixtureRequest) -> None:
    ids = defaultdict(list)
    patterns = {}
    for item in collected(request):
        name = item.nodeid.partition("[")[0]
        ids[name].append(tiers.parameters(item))
        patterns[name] = tiers.defaults(item)
    unmatched = [
        f"{name}: {pattern}"
        for name, wanted in patterns.items()
        for pattern in wanted
        if not any(fnmatchcase(one, pattern) for one in ids[name])
    ]
    assert unmatched == []


def steps(workflow: str) -> list[dict[str, Any]]:
    content = yaml.safe_load((WORKFLOWS / workflow).read_text())
    return [step for job in content["jobs"].values() for step in job["steps"]]


def test_the_nightly_workflow_runs_both_tiers_with_the_actions_of_ci() -> None:
    nightly, ci = steps("nightly.yml"), steps("ci.yml")
    assert any("scripts/test --all" in step.get("run", "") for step in nightly)
    assert [step.get("run") for step in ci if "run" in step] == [".ci/run"]
    assert [step["uses"] for step in nightly if "uses" in step] == [
        step["uses"] for step in ci if "uses" in step
    ]


@pytest.mark.full(default="one")
@pytest.mark.parametrize("number", [1, 2], ids=["one", "two"])
def test_an_example_of_both_tiers(number: int) -> None:
    assert number in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([__file__], ["one"]),
        (["--all", __file__], ["one", "two"]),
        (["tests/test_tiers.py::test_an_example_of_both_tiers"], ["one", "two"]),
        ([f"{__file__}::test_an_example_of_both_tiers[two]"], ["two"]),
    ],
    ids=["default", "all", "named", "named parameter by an absolute path"],
)
def test_full_tests_run_with_all_and_by_their_names(arguments: list[str], found: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-k", "example"], cwd=ROOT, env=own, capture_output=True, text=True, check=True
    )
    examples = [line for line in done.stdout.splitlines() if "::" in line]
    assert examples == [f"tests/test_tiers.py::test_an_example_of_both_tiers[{name}]" for name in found]
