"""Nodes as mount namespaces: the same path is a file system in memory of each node's own. And a slow link."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import zerokit
from tests.support.distributed import AT_ONCE, run_ranks
from tests.support.namespaces import HUB, ROOT, wired_hosts
from tests.support.nodes import AdamW, Training, place, warned
from zerokit.checkpoint.run import step_name

pytestmark = pytest.mark.netns

CLONE_NEWNS = 0x20000


def _enter_node(place: Path, size: str = "64m") -> None:
    """Give this rank mounts of its own, with an empty file system at `place`."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount", "--make-rprivate", "/")
    _mount(place, size)


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _mount(place: Path, size: str = "64m") -> None:
    _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", place)


def _saved_and_replaced(folder: str) -> None:
    own, rank = Path(folder, "own"), dist.get_rank()
    _enter_node(own)
    run = own / "run"
    training = Training()
    training.train(0, 2)
    training.save(run, 2, shared=False, copies=2)
    before = training.bits(Path(folder, "before"), 2)
    assert len(list((run / step_name(2)).glob("rank-*"))) == 2
    dist.barrier()
    for empty, step in ((1, 2), (0, 4)):
        if rank == empty:  # a node in its stead, which has not even the run's directory
            _run("umount", own)
            _mount(own)
            assert not list(own.iterdir())
        training = Training()
        extra, said = training.load([run])
        assert (extra, said) == ({"step": step}, [])
        assert training.bits(Path(folder, f"after-{step}"), step) == before
        # The next save brings both nodes all files again.
        training.train(step, step + 2)
        training.save(run, step + 2, shared=False, copies=2)
        assert len(list((run / step_name(step + 2)).glob("rank-*"))) == 2
        before = training.bits(Path(folder, f"next-{step}"), step + 2)
        assert zerokit.list_steps([run], training.optimizer) == [step, step + 2]
        dist.barrier()


def _too_little_room(folder: str) -> None:
    own, rank = Path(folder, "own"), dist.get_rank()
    _enter_node(own, "16k" if rank == 1 else "64m")
    run = own / "run"
    training = Training()
    training.train(0, 2)
    with pytest.raises(zerokit.CheckpointError, match=r"rank 1: .*are free on its file system: keep fewer"):
        training.save(run, 2, shared=False)
    assert not [path for path in run.iterdir() if path.name != "latest"]
    copies = zerokit.Copies(training.optimizer, run, every=2, step=2, extra=lambda n: {"step": n})

    def train() -> None:
        for number in range(2, 6):
            training.step(number)
            with contextlib.suppress(zerokit.CheckpointError):
                copies.wait()

    _, said = warned(train)
    assert (copies.step, copies.saved) == (6, None)
    if rank == 0:
        assert any("step 4 has no copies: rank 1: " in text for text in said), said
    assert not [path for path in run.iterdir() if path.name != "latest"]
    dist.barrier()
    if rank == 1:
        _run("mount", "-o", "remount,size=64m", own)
    dist.barrier()
    warned(lambda: training.train(6, 8))
    copies.wait()
    assert copies.saved == 8
    assert Training().load([run])[0] == {"step": 8}


@pytest.mark.parametrize("work", [_saved_and_replaced, _too_little_room])
def test_namespaces(tmp_path: Path, work: Any) -> None:
    (tmp_path / "own").mkdir()
    run_ranks(2, work, str(tmp_path), **AT_ONCE)
    assert not os.listdir(tmp_path / "own")


def train_on_slow_link(rank: int, folder: str) -> None:
    """A training of two ranks whose copies take far longer than three steps."""
    dist.init_process_group(
        "gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    model = nn.Linear(20, 12)
    model.base = nn.Parameter(torch.ones(1 << 17), requires_grad=False)  # which no step sends
    optimizer = zerokit.ZeroOptimizer(model, AdamW, stage=2, precision="fp32")
    copies = zerokit.Copies(optimizer, place(folder, rank), every=3)

    def train() -> None:
        while copies.saved is None:
            optimizer.backward(model(torch.ones(2, 20)).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    _, said = warned(train)
    # Steps were made all the while, and the first copy is of the third one.
    assert copies.saved == 3
    assert copies.step > 6
    if rank == 0:
        taken = copies.step - 3
        (text,) = said
        assert f"every=3 is too small: a copy is under way for up to {taken} steps" in text
        assert f"one in {taken} steps" in text
    copies.wait()
    assert copies.saved == copies.step
    dist.barrier()
    dist.destroy_process_group()


def test_a_slow_link(tmp_path: Path) -> None:
    with wired_hosts(servers=False) as hosts:
        for host in hosts.addresses:
            limit = "root tbf rate 8mbit burst 32kb latency 400ms"
            _run(
                "ip",
                "netns",
                "exec",
                hosts.namespace(HUB),
                "tc",
                "qdisc",
                "add",
                "dev",
                f"to-{host}",
                *limit.split(),
            )
        program = f"from {__name__} import train_on_slow_link; train_on_slow_link(%d, {str(tmp_path)!r})"
        processes = [
            subprocess.Popen(
                [*hosts.inside(host), sys.executable, "-c", program % rank],
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts.addresses)
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
