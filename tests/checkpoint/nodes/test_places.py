"""Several places of a load: the newest step counts, wherever it is, and nothing else is read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import flip
from tests.support.distributed import run_ranks
from tests.support.nodes import Training, place
from tests.support.saving import in_turn
from zerokit import files
from zerokit.checkpoint.run import step_name


def _on_first(task: Any) -> None:
    """On rank 0, before all others go on."""
    dist.barrier()
    if dist.get_rank() == 0:
        task()
    dist.barrier()


class Layered:
    """Memory and a disk of each node, and a shared disk, with steps of one training."""

    def __init__(
        self, folder: str, memory: tuple[int, ...], own: tuple[int, ...], shared: tuple[int, ...]
    ) -> None:
        rank = dist.get_rank()
        self.memory = place(f"{folder}/memory", rank)
        self.own = place(f"{folder}/own", rank)
        self.shared = Path(folder, "shared")
        self.training = Training()
        for step in sorted({*memory, *own, *shared}):
            self.training.step(step)
            if step in memory:
                self.training.save(self.memory, step, shared=False)
            if step in own:
                self.training.save(self.own, step, shared=False)
            if step in shared:
                self.training.save(self.shared, step)
        dist.barrier()

    @property
    def places(self) -> list[Path]:
        return [self.memory, self.own, self.shared]

    def load(self, **options: Any) -> tuple[int, list[str]]:
        extra, said = self.training.load(self.places, **options)
        return extra["step"], said


def _newest_wins(folder: str) -> None:
    layered = Layered(f"{folder}/a", memory=(2, 3), own=(2,), shared=(1,))
    assert layered.load() == (3, [])
    assert zerokit.list_steps(layered.places, layered.training.optimizer) == [2, 3]
    layered = Layered(f"{folder}/b", memory=(1, 2), own=(3,), shared=(2,))
    assert layered.load() == (3, [])
    layered = Layered(f"{folder}/c", memory=(1, 2), own=(1,), shared=(4,))
    assert layered.load() == (4, [])
    assert zerokit.list_steps(layered.places, layered.training.optimizer) == [1, 2, 4]


def _what_is_lost(folder: str) -> None:
    rank = dist.get_rank()
    layered = Layered(f"{folder}/a", memory=(4, 5), own=(3,), shared=(2,))
    shutil.rmtree(layered.memory)
    dist.barrier()
    assert layered.load() == (3, [])  # the memory of all nodes is gone: nothing says that it was ever there
    shutil.rmtree(layered.own.parent)
    dist.barrier()
    assert layered.load() == (2, [])
    _on_first(lambda: shutil.rmtree(layered.shared))
    with pytest.raises(zerokit.errors.MissingPath, match="no step of zerokit's on any rank's node"):
        layered.load()
    assert zerokit.list_steps(layered.places, layered.training.optimizer) == []
    # With both holders of one rank's file gone, in memory, the disk has the newest complete step.
    layered = Layered(f"{folder}/b", memory=(4, 5), own=(), shared=(3,))
    for step in (4, 5):
        (layered.memory / step_name(step) / "rank-00001-of-00002.safetensors").unlink()
    dist.barrier()
    step, said = layered.load()
    assert step == 3
    if rank == 0:
        (text,) = said
        assert text.startswith("step 3 is loaded: step 5 is incomplete: files of rank 1 are missing")
        assert "step 4 is incomplete" in text
    else:
        assert said == []


def _damaged_in_memory_and_whole_on_the_disk(folder: str) -> None:
    """The same step, not the one before it; and from a later place the newer step, not memory's older one."""
    for number, (memory, shared, wanted) in enumerate([((4, 5), (3, 5), 5), ((3, 5), (4,), 4)]):
        layered = Layered(f"{folder}/{number}", memory=memory, own=(), shared=shared)
        flip(layered.memory / step_name(5) / "rank-00001-of-00002.safetensors", 4096, 1)
        dist.barrier()
        step, said = layered.load()
        assert step == wanted
        if dist.get_rank() == 0:
            assert "step-00000005: damaged on every node that has it: " in said[0]


class Spying(files.System):
    pass


def _later_places_are_not_read(folder: str) -> None:
    layered = Layered(folder, memory=(3, 4), own=(2, 4), shared=(1, 4))
    opened: list[str] = []
    true_open = os.open

    def spy(path: Any, *arguments: Any, **named: Any) -> int:
        opened.append(str(path))
        return true_open(path, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", spy)
        assert layered.load() == (4, [])
    assert [path for path in opened if str(layered.memory) in path]
    assert not [path for path in opened if str(layered.own) in path or str(layered.shared) in path]


def _paths_of_all_kinds(folder: str) -> None:
    layered = Layered(folder, memory=(2,), own=(1,), shared=(1,))
    optimizer, rank = layered.training.optimizer, dist.get_rank()
    nowhere = Path(folder, "nowhere", "run")
    through = Path(folder, f"file-{rank}", "run")
    through.parent.write_text("")
    for places, wanted in (
        ([layered.memory], 2),
        ([str(layered.memory)], 2),
        ((layered.shared,), 1),
        (layered.memory, 2),
        ([layered.own / step_name(1)], 1),
        ([nowhere, layered.memory], 2),
        ([nowhere, layered.shared], 1),
        ([layered.memory, nowhere], 2),
        ([through, layered.memory], 2),
        ([layered.shared, layered.memory, layered.memory], 2),
    ):
        extra, said = layered.training.load(places)
        assert (extra["step"], said) == (wanted, []), places
    with pytest.raises(zerokit.errors.MissingPath, match="nowhere"):
        zerokit.load([nowhere, through], optimizer)
    with pytest.raises(zerokit.UsageError, match="name at least one"):
        zerokit.load([], optimizer)
    with pytest.raises(zerokit.UsageError, match="ranks name 1, 2 places"):
        zerokit.load([layered.memory] * (1 + rank), optimizer)
    with pytest.raises(zerokit.UsageError, match="rename applies to other frameworks"):
        zerokit.load([layered.memory], optimizer, rename=str)
    with pytest.raises(zerokit.UsageError, match="pass the optimizer"):
        zerokit.list_steps([layered.memory])
    # Only one rank has such a file in the way: the others have what is needed.
    extra, said = layered.training.load([through if rank else layered.memory])
    assert (extra["step"], said) == (2, [])


def _weights_only_and_what_does_not_fit(folder: str) -> None:
    layered = Layered(folder, memory=(2,), own=(), shared=())
    training = layered.training
    training.save(layered.memory, 3, shared=False, weights_only=True)
    dist.barrier()
    assert layered.load() == (2, [])
    assert layered.load(weights_only=True) == (3, [])
    from tests.support.nodes import Kind

    larger = Training(Kind(layers=4))
    with pytest.raises(zerokit.CheckpointError, match=r"layers\.3"):
        larger.load([layered.memory])
    extra, said = larger.load([layered.memory], strict=False)
    assert extra == {"step": 2}
    if dist.get_rank() == 0:
        assert "layers.3" in said[0]


WORKS = [
    _newest_wins,
    _what_is_lost,
    _damaged_in_memory_and_whole_on_the_disk,
    _later_places_are_not_read,
    _paths_of_all_kinds,
    _weights_only_and_what_does_not_fit,
]


@pytest.mark.parametrize("work", WORKS)
def test_places(tmp_path: Path, work: Any) -> None:
    run_ranks(2, in_turn, [work], str(tmp_path))
