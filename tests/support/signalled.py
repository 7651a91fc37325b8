"""A program whose process group is signalled while its workers make batches; started by tests/training/test_workers.py.

    python signalled.py SIGNAL KIND...

Workers of each of these kinds must outlive the signal, and end when they are terminated; without a `StopSignal` they
end by signals as ever. It prints a line for each.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.utils.data import DataLoader, Dataset, IterableDataset

import zerokit

METHODS = ("fork", "spawn", "forkserver")
ITEMS = 10_000


def slow(index: int) -> Tensor:
    time.sleep(0.01)
    return torch.full((4,), float(index))


class Map(Dataset[Tensor]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        return slow(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return map(slow, range(ITEMS))


class Managed(Map):
    """Asks the process of a manager for each item."""

    def __init__(self, manager: Any) -> None:
        self._seen = manager.dict()

    def __getitem__(self, index: int) -> Tensor:
        self._seen[index] = index
        return slow(self._seen[index])


def loader(
    stack: ExitStack, method: str, data: Dataset[Tensor] | None = None, **options: Any
) -> Iterator[Tensor]:
    context = multiprocessing.get_context(method)
    return iter(DataLoader(data or Map(), 2, num_workers=2, multiprocessing_context=context, **options))


def managed(stack: ExitStack) -> Iterator[Tensor]:
    manager = stack.enter_context(multiprocessing.get_context("spawn").Manager())
    return loader(stack, "fork", Managed(manager))


def pool(stack: ExitStack, method: str) -> Iterator[Tensor]:
    workers = stack.enter_context(multiprocessing.get_context(method).Pool(2))
    return workers.imap(slow, range(ITEMS))


def executor(stack: ExitStack) -> Iterator[Tensor]:
    workers = stack.enter_context(concurrent.futures.ProcessPoolExecutor(2))
    return (workers.submit(slow, index).result() for index in range(ITEMS))


def producer(stack: ExitStack) -> Iterator[Tensor]:
    queue: Any = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(target=fill, args=(queue,), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    return (torch.tensor(queue.get()) for _ in range(ITEMS))


def fill(queue: Any) -> None:
    for index in range(ITEMS):
        queue.put(slow(index).tolist())


KINDS: dict[str, Callable[[ExitStack], Iterator[Tensor]]] = {
    **{f"loader, {method}": partial(loader, method=method) for method in METHODS},
    **{f"pool, {method}": partial(pool, method=method) for method in METHODS},
    "loader, persistent": partial(loader, method="fork", persistent_workers=True),
    "loader, stream": partial(loader, method="fork", data=Stream()),
    "manager": managed,
    "executor": executor,
    "producer": producer,
}


def play(kind: str, number: int, optimizer: zerokit.ZeroOptimizer, *, before: bool) -> None:
    """Train on batches of these workers, while a signal comes to the whole process group."""
    model = optimizer.runtime.model
    taken = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    with ExitStack() as stack:
        early = KINDS[kind](stack) if before else None
        with zerokit.StopSignal(optimizer, signals=taken) as stop:
            left = 12  # batches after the signal: more than were made ahead
            for step, batch in enumerate(KINDS[kind](stack) if early is None else early):
                optimizer.backward(model(batch.view(-1, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    signaller = subprocess.Popen(["sh", "-c", f"kill -{number:d} 0"])
                left -= stop.requested()
                if not left:
                    break
            stack.close()  # pools are terminated and joined here, where the signals are taken
    print(f"{kind}, {'before' if before else 'inside'}: {stop.reason}, {-signaller.wait()}", flush=True)


def without() -> None:
    """No StopSignal is entered: signals act on workers as ever."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        print(f"alone: {_signalled(number, daemon=True)}", flush=True)


def others(optimizer: zerokit.ZeroOptimizer) -> None:
    """A process that is no worker passes SIGUSR1 over, and SIGTERM ends it."""
    with zerokit.StopSignal(optimizer):
        print(f"other: {_signalled(signal.SIGUSR1, signal.SIGTERM, daemon=False)}", flush=True)


def early(optimizer: zerokit.ZeroOptimizer) -> None:
    """A worker that is signalled before it has begun outlives it too, and a process that is none ends by it."""
    with zerokit.StopSignal(optimizer):
        _SIGNALLED_AT_ONCE.append(signal.SIGTERM)
        with concurrent.futures.ProcessPoolExecutor(1) as workers:
            done = workers.submit(abs, -1).result()
        other = multiprocessing.Process(target=time.sleep, args=(3600,))
        other.start()
        other.join()
        _SIGNALLED_AT_ONCE.clear()
    print(f"early: {done} {other.exitcode}", flush=True)


_SIGNALLED_AT_ONCE: list[signal.Signals] = []
"""What a forked child gets before it runs anything else."""


def _signal_at_once() -> None:
    for number in _SIGNALLED_AT_ONCE:
        os.kill(os.getpid(), number)


os.register_at_fork(after_in_child=_signal_at_once)


def _signalled(*numbers: int, daemon: bool) -> int | None:
    process = multiprocessing.Process(target=time.sleep, args=(3600,), daemon=daemon)
    process.start()
    for number in numbers:
        subprocess.run(["sh", "-c", f"kill -{number:d} {process.pid}"], check=True)
    process.join()
    return process.exitcode


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=600))
        model = nn.Linear(4, 4)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=2, precision="fp32", lr=1e-6)
        without()
        others(optimizer)
        # A script's own handler, which forked workers inherit, does not keep them from being terminated.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        early(optimizer)
        for kind in sys.argv[2:]:
            for before in (True, False):
                play(kind, signal.Signals[sys.argv[1]], optimizer, before=before)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
