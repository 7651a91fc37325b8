"""`zerokit bench --elastic` under torchrun: it restarts the ranks, on the nodes that are there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import CLI, FORKS, Torchrun, processes_of, wait_for, zerokit_forked
from tests.cli.elastic import (
    MODEL,
    hold_at,
    kill_rank,
    let_go,
    prepare,
    require_plain_order,
    trained,
)
from tests.support.processes import children_of
from zerokit.bench.record.record import read_record
from zerokit.launch.network import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
BENCH = ("bench", *MODEL, "--elastic", "--save", "run", "--save-every", "3", "--output", "record.json")


@contextlib.contextmanager
def torchrun(folder: Path, tag: str, *options: str) -> Iterator[Torchrun]:
    """An agent; its processes are known by `tag`, and end with this context."""
    words = (*FORKS, *options, CLI, *BENCH, "--steps", "12", "--no-mlflow")
    variables = {
        "TAG": tag,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torch 2.13's agents wait for each other in vain when a node joins later.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if tag != "alone" else "0",
    }
    with Torchrun(folder, words, **variables) as process:
        try:
            yield process
        finally:
            kill_all(folder, tag, process)


def kill_all(folder: Path, tag: str, agent: Torchrun) -> None:
    """A machine that is gone: the agent and all that it has started, before one of them notices."""
    agent.send_signal(signal.SIGSTOP)
    ranks = [pid for pid, seen in processes_of(folder).items() if seen.get("TAG") == tag]
    for pid in [*children_of(agent.pid), *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.kill()


def ended(process: Torchrun) -> None:
    said, errors = process.communicate(timeout=800)
    assert process.returncode == 0, said + errors


def test_a_killed_rank_is_started_anew_by_torchrun(tmp_path: Path) -> None:
    """On one node the store of the agent outlives the ranks, with what the former ones have said there."""
    seen = prepare(tmp_path, hold=5)
    with torchrun(
        tmp_path, "alone", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"
    ) as process:
        wait_for(trained(tmp_path, 0, 5), process)
        let_go(seen)
        kill_rank(seen, 1)
        ended(process)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [(2, 1, 5), (2, 4, 12)]
    assert "was killed by SIGKILL" in record.parts[0].ended
    require_plain_order(tmp_path, record.parts)
    whole = zerokit_forked(
        tmp_path,
        *("bench", *MODEL, "--nproc-per-node", "2", "--warmup", "0", "--steps", "12"),
        *("--output", "whole.json", "--no-mlflow"),
        OMP_NUM_THREADS="1",
    )
    assert whole.returncode == 0, whole.stderr
    assert record.loss == read_record(tmp_path / "whole.json").loss
    assert processes_of(tmp_path) == {}


def test_a_node_that_leaves_shrinks_the_job_and_one_that_comes_grows_it(tmp_path: Path) -> None:
    seen = prepare(tmp_path, hold=5)
    nodes = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"),
        "--rdzv-conf",
    )
    # The first one has the rendezvous: whoever has it must not leave. The second waits for it, so as not to be late.
    host, guest = "is_host=true,last_call_timeout=8", "is_host=false,last_call_timeout=8"
    with (
        torchrun(tmp_path, "second", *nodes, guest) as second,
        torchrun(tmp_path, "first", *nodes, host) as first,
    ):
        wait_for(trained(tmp_path, 0, 5), first)
        kill_all(tmp_path, "second", second)
        hold_at(seen, 1000)
        wait_for(lambda: b"ended" in part(tmp_path, 0) or bool(part(tmp_path, 1)), first)
        hold_at(seen, 4)
        wait_for(trained(tmp_path, 1, 7), first)
        let_go(seen)
        with torchrun(tmp_path, "third", *nodes, guest) as third:
            ended(first)
            ended(third)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [
        (2, 1, 5),
        (1, 4, 7),
        (2, 7, 12),
    ]
    require_plain_order(tmp_path, record.parts)
    assert (record.settings.world, record.restarts, len(record.loss)) == (2, 2, 12)


def part(folder: Path, number: int) -> bytes:
    """What the file of a part holds; nothing where there is none."""
    try:
        return (folder / "run" / "elastic" / f"part-{number:04d}.jsonl").read_bytes()
    except FileNotFoundError:
        return b""
