"""`extra` that differs between ranks: kept for each, handed out by rank, and refused by name on another number."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import with_extra
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.saving import in_turn, small_optimizer
from zerokit.checkpoint.by_rank import ByRank, decode_by_rank, differing, encode_by_rank
from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.verify import verify_all


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ([{"a": "1"}, {"a": "1"}], ()),
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], ("b",)),
        ([{"a": "1"}, None, None], ()),
        ([None, None], ()),
        ([None, {"a": "1"}], (None,)),
        ([{"a": "1"}, {"a": "1"}, None], (None,)),
        ([{"a": "1"}, {"b": "1"}], (None,)),
        ([{None: "1"}, {None: "2"}], (None,)),
        ([{None: "1"}, {None: "1"}], ()),
        ([{None: "1"}, {"a": "1"}], (None,)),
    ],
)
def test_members_that_differ(digests: Any, expected: Any) -> None:
    assert differing(digests) == expected


def test_values_by_rank_come_back_with_their_tensors() -> None:
    """Names of tensors are apart, though keys with slashes look alike."""
    shared = {"a": {"0": torch.ones(1)}, "a/0": torch.zeros(1), "$": 1, "loader": None}
    own = [{"seen": np.arange(rank), "at": (rank,), "t": torch.full((2,), rank)} for rank in range(3)]
    plain, tensors = encode_by_rank(shared, {"loader": own})
    assert len(tensors) == 2 + 6
    for rank in range(3):
        found = decode_by_rank(json.loads(json.dumps(plain)), tensors, "extra", rank)
        assert list(found) == list(shared)
        assert found["loader"]["seen"].tolist() == list(range(rank))
        assert found["loader"]["at"] == (rank,)
        assert found["a"]["0"].item() == 1
        assert found["a/0"].item() == 0
    assert list(decode_by_rank(plain, tensors, "extra", 0, ["loader"])) == ["a", "a/0", "$"]
    every = decode_by_rank(plain, tensors, "extra")["loader"]
    assert isinstance(every, ByRank)
    assert [one["at"] for one in every] == [(0,), (1,), (2,)]
    whole, tensors = encode_by_rank(None, {None: [1, "b"]})
    assert [decode_by_rank(whole, tensors, "extra", rank) for rank in range(2)] == [1, "b"]
    assert decode_by_rank(whole, tensors, "extra", 0, [None]) is None
    with pytest.raises(zerokit.CheckpointError, match="cannot be written"):
        encode({"loader": ByRank((1, 2))})


def _saved(folder: str) -> None:
    zero, rank = small_optimizer(), dist.get_rank()
    extras: dict[int, Any] = {
        1: {"loader": {"shard": rank, "buffer": torch.arange(rank + 1)}, "schedule": {1: 0.5}},
        2: rank,
        3: {"schedule": 1} if rank == 0 else None,
        4: {"a": rank, f"of {rank}": 1},
        5: {"loader": [1, {2, 3}], "nan": float("nan")},
        6: {"loader": rank},
    }
    for step, extra in extras.items():
        done = zerokit.save(
            f"{folder}/run", zero, step=step, extra=extra, weights_only=step == 6, blocking=False
        )
        if step == 1:
            extra["loader"]["buffer"].add_(7)  # the save holds values of its moment
        done.wait()
        back = zerokit.load(f"{folder}/run/step-{step:08d}", zero, weights_only=step == 6)
        if step == 1:
            assert back["loader"].pop("buffer").tolist() == list(range(rank + 1))
            assert (back["loader"], back["schedule"]) == ({"shard": rank}, {1: 0.5})
        elif step == 3:
            assert back == {"schedule": 1}
        else:
            assert repr(back) == repr(extra)
    with pytest.raises(zerokit.CheckpointError, match=r"^rank 1: extra/loader: a builtins\.object cannot"):
        zerokit.save(f"{folder}/run", zero, step=7, extra={"loader": object() if rank else 1})


def _elsewhere(folder: str) -> None:
    """On another number of ranks."""
    zero = small_optimizer()
    step = f"{folder}/run/step-00000001"
    before = [unit.kept.tensor.clone() for unit in zero.runtime.units]
    for cut in (step, f"{folder}/cut"):
        with pytest.raises(
            zerokit.CheckpointError, match=r"each of the 2 ranks .* extra\['loader'\], and 3 load it"
        ):
            zerokit.load(cut, zero)
        assert not zero.refusal
        assert all(map(torch.equal, before, (unit.kept.tensor for unit in zero.runtime.units)))
    with pytest.raises(zerokit.CheckpointError, match="gave another extra, and 3 load it"):
        zerokit.load(f"{folder}/run/step-00000002", zero)
    choices: list[dict[str, Any]] = [{"strict": False}, {"weights_only": True}]
    for options in choices:
        with _warned(r"extra\['loader'\], which 2 ranks gave each for itself"):
            assert zerokit.load(step, zero, **options) == {"schedule": {1: 0.5}}
    with _warned("extra, which 2 ranks gave each for itself"):
        assert zerokit.load(f"{folder}/run/step-00000002", zero, strict=False) is None
    assert zerokit.load(f"{folder}/run/step-00000003", zero) == {"schedule": 1}
    assert zerokit.load(f"{folder}/run/step-00000005", zero)["loader"] == [1, {2, 3}]


def _warned(text: str) -> Any:
    return nullcontext() if dist.get_rank() else pytest.warns(UserWarning, match=text)


def test_each_rank_gets_its_own_and_another_number_is_refused(tmp_path: Path) -> None:
    run_ranks(2, in_turn, [_saved], str(tmp_path), apart=False)
    run, step = tmp_path / "run", tmp_path / "run/step-00000001"
    versions = [
        json.loads((run / f"step-0000000{n}/manifest.json").read_text())["version"] for n in range(1, 7)
    ]
    assert versions == [[1, 2], [1, 2], [1, 0], [1, 2], [1, 0], [1, 2]]
    assert all(report.intact for report in verify_all(run))
    every = zerokit.Checkpoint(step).extra()["user"]["loader"]
    assert [one["shard"] for one in every] == [0, 1]
    found = zerokit.inspect(step)
    assert (found.extra_ranks, found.by_rank) == (2, ("loader",))
    with pytest.warns(
        zerokit.ZerokitWarning, match=re.escape("extra['loader'] is carried over as 2 ranks gave it")
    ):
        zerokit.reshard(step, 3, tmp_path / "cut")
    assert zerokit.verify(tmp_path / "cut").intact
    zerokit.reshard(tmp_path / "cut", 2, tmp_path / "again")
    assert read_tree(tmp_path / "again") == read_tree(step)
    with pytest.warns(zerokit.ZerokitWarning, match="extra.loader"):
        zerokit.convert(step, tmp_path / "dcp", format="dcp")
    zerokit.consolidate(step, tmp_path / "weights")
    run_ranks(3, in_turn, [_elsewhere], str(tmp_path), apart=False)


def test_values_of_another_number_than_the_manifest_s_are_refused(step: Path) -> None:
    for user, message in (
        ({"loader": {"$": "ranks", "items": [1, 2]}}, "'loader' has values of 2 ranks, the manifest says 0"),
        ({"$": "ranks", "items": 3}, "items"),
        ({"a": {"b": {"$": "ranks", "items": [1]}}}, "type 'ranks' is unknown"),
    ):
        with_extra(step, {"user": user})
        with pytest.raises(zerokit.CheckpointError, match=message):
            zerokit.Checkpoint(step).extra()
        assert not zerokit.verify(step).intact
