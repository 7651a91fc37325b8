"""Settings of all tests: what each marker needs of the machine, and no test measured by its time."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import namespaces, slurm, tiers

with contextlib.suppress(ImportError):  # a GPU machine may lack it: the tests marked `gpu` do without
    from hypothesis import HealthCheck, settings

    # A machine with more at work than cores lets any example take seconds.
    settings.register_profile("zerokit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("zerokit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `full` as well")


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if config.getoption("--all") else "tests marked `full` are left out; --all runs them as well"


def pytest_configure() -> None:
    """Makes all processes of the tests batch jobs, which never take a core from a thread that is at work.

    gloo's socket thread spins while another thread holds its connection's lock. With more ranks than cores it often
    wakes on the very core where that thread is, and spins until the scheduler lets that one go on.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Debian keeps tc, sshd and Slurm's daemons there, but puts it on no path but root's after a login.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    # In the background of a shell, or under nohup, these are ignored: tests send them.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Takes what was imported for kept: looking for garbage in it takes a tenth of the time that the imports do."""
    gc.freeze()
    gc.enable()


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


# Why this machine cannot run the tests of a marker; None where it can. Each is asked at most once.
REFUSALS: dict[str, Callable[[], str | None]] = {
    "gpu": _no_gpu,
    "netns": namespaces.refusal,
    "sshd": namespaces.hosts_refusal,
    "slurm": slurm.refusal,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the full tier, and skips those whose marker names what this machine lacks.

    `-ra` in pyproject.toml lists those that are skipped, with the reasons.
    """
    tiers.select(config, items)
    for marker, refusal in REFUSALS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := refusal()) is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and what they start, work in a folder of their own: none leaves files in the repository."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """No test leaves variables behind: a RANK of one would make the next ones, and what they start, a torchrun's rank.

    What zerokit sets for MLflow's client before its import stays for as long as the process.
    """
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}
    if changed:
        from zerokit.bench.tracking.store import ENVIRONMENT

        changed -= ENVIRONMENT.keys()
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in changed & before.keys()})
    assert not changed, f"the test left {sorted(changed)} changed in the environment"
