"""The device's way, tried on hosts: side streams whose results come late, and a host that reads nothing in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.devices import (
    DEVICES,
    PRECISIONS,
    SCENES,
    STAGES,
    WIRE,
    Scene,
    Training,
    alone_on_gpu,
    at,
    lagging,
    placed,
    prompt,
    run_on,
    train,
)
from tests.support.missing_waits import ALONE, MUTATIONS
from tests.support.on_ranks import on_ranks
from tests.support.recording import plain_unit
from zerokit.placement import Axis
from zerokit.runtime.collectives import Wire
from zerokit.runtime.collectives.nccl import NcclCollectives, NcclRoute
from zerokit.runtime.shards import Shards


def late_and_prompt(
    device: str, cases: Sequence[tuple[str, Any, Sequence[int]]], threaded: bool = False
) -> list[str]:
    """Where late results change something, of scenes in a precision at some stages."""
    scenes = [(at(SCENES[name], precision=precision), stages) for name, precision, stages in cases]
    with alone_on_gpu(device):
        place = placed(device)
        with prompt(device):
            expected = [train(at(scene, stage=0), place) for scene, _ in scenes]
        with lagging(device):
            return [
                f"{case}, stage {stage}"
                for case, (scene, stages), bits in zip(cases, scenes, expected, strict=True)
                for stage in stages
                if train(at(scene, stage=stage), place, threaded=threaded) != bits
            ]


@pytest.mark.parametrize("name", SCENES)
def test_late_results_change_no_bit(name: str) -> None:
    """Each scene at each stage and in each precision; and these two with each other, by turns."""
    ways, turn = [*PRECISIONS, WIRE], list(SCENES).index(name)
    cases = [(name, way, [(number + turn) % 4]) for number, way in enumerate(ways)]
    assert run_on("cpu", late_and_prompt, cases) == [[], []]


@pytest.mark.full(default="3")
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_in_a_thread_of_their_own_change_no_bit(stage: int) -> None:
    """On CUDA forward's hooks run in the main thread, and those of backward in autograd's thread of the device."""
    ways = [*PRECISIONS, WIRE]
    cases = [
        (name, ways[(number // 2 + stage) % 4], [stage])
        for number, name in enumerate(SCENES)
        if (number + stage) % 2
    ]
    assert run_on("cpu", late_and_prompt, cases, True) == [[], []]


@on_ranks(4, [(name, stage) for stage in ((0, 3), (1, 3), (2, 2)) for name in ("muon", "adafactor")])
def test_late_results_of_whole_tensors_change_no_bit_on_two_axes(given: tuple[str, tuple[int, int]]) -> None:
    name, stage = given
    scene = at(SCENES["whole tensors"], stage=stage, mesh=(2, 2), optimizer=name)
    with prompt("cpu") as device:
        expected = train(scene, device)
    with lagging("cpu"):
        assert train(scene, device) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_late_results_change_no_bit_on_a_gpu(precision: str) -> None:
    cases = [(name, precision, STAGES) for name in SCENES]
    assert run_on("cuda", late_and_prompt, cases) == [[]]


@pytest.mark.parametrize("device", DEVICES)
@on_ranks({"cpu": 2, "cuda": 1})
def test_what_is_rounded_lives_until_it_has_been_sent(device: str) -> None:
    """Reductions behind each other; on a GPU with this rank alone."""
    with lagging(device) as place:
        optimizer = zerokit.ZeroOptimizer(nn.Linear(4, 4).to(place), torch.optim.SGD, lr=0.1)
        route, rank, world = optimizer.runtime.collectives, dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        pieces = torch.randn(3, world, world, 4096, generator=generator).to(place)
        out, unit = torch.zeros(4096, device=place), plain_unit(0, 4096 * world, world)
        for number in pieces.unbind():
            # One rank rounds nothing, so its route is asked directly.
            bucket = Shards(unit, number[rank].flatten().clone())
            wire = Wire(torch.bfloat16)
            route.routes[Axis.INNER].reduction(bucket, unit.cut, out, wire)(None).wait()
            torch.full((1 << 16,), float("nan"), device=place)  # takes memory that was given back too early
            total = number[0, rank].bfloat16().float()
            for peer in number[1:, rank]:
                total += peer.bfloat16().float()
            assert torch.equal(out, total)


def _bits_of(loop: Callable[[Training], None], scene: Scene, device: torch.device) -> list[str]:
    training = Training(
        scene, device, on_nonfinite="ignore"
    )  # the nan of what is not waited for is to be seen
    loop(training)
    return training.bits()


def mutated(device: str, name: str, stages: tuple[int, ...]) -> dict[int, tuple[bool, str]]:
    """By stage: whether the run is right with all its waits, and what happens without one."""
    mutation = MUTATIONS[name]
    found = {}
    with alone_on_gpu(device):
        place = placed(device)
        with prompt(device):
            expected = _bits_of(mutation.loop, at(SCENES[mutation.scene], stage=0, steps=3), place)
        for stage in stages:
            scene = at(SCENES[mutation.scene], stage=stage, steps=3)
            right = True
            if stage in mutation.stages:  # else the run without the wait is right itself
                with lagging(device):
                    right = _bits_of(mutation.loop, scene, place) == expected
            try:
                with lagging(device), pytest.MonkeyPatch.context() as patch:
                    mutation.apply(patch)
                    seen = "the same" if _bits_of(mutation.loop, scene, place) == expected else "other bits"
            except (AssertionError, zerokit.UsageError) as error:
                seen = str(error).splitlines()[0]
            found[stage] = right, seen
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_wait_is_noticed(name: str) -> None:
    """At the first and the last stage that need it, and at one that does not."""
    needing = MUTATIONS[name].stages
    others = tuple(stage for stage in STAGES if stage not in needing)
    for found in run_on("cpu", mutated, name, (*{needing[0], needing[-1]}, *others[:1])):
        for stage, (right, seen) in found.items():
            assert right, f"stage {stage}: differs though nothing was changed"
            assert (seen != "the same") == (stage in MUTATIONS[name].stages), f"stage {stage}: {seen}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALONE)
def test_a_missing_wait_is_noticed_on_a_gpu(name: str) -> None:
    (found,) = run_on("cuda", mutated, name, ALONE[name])
    assert found == dict.fromkeys(ALONE[name], (True, "other bits"))


def _route(training: Training) -> NcclRoute:
    collectives = training.optimizer.runtime.collectives
    assert isinstance(collectives, NcclCollectives)
    route = collectives.routes[Axis.INNER]
    assert isinstance(route, NcclRoute)
    return route


@on_ranks(2, (1, 2))
def test_updated_weights_are_waited_for_in_the_next_forward_and_not_before(stage: int) -> None:
    """The first gather in flight after `step()` is so after `zero_grad()`."""
    with lagging("cpu") as device:
        training = Training(at(SCENES["plain"], stage=stage), device)
        training.step(0)
        training.differentiate(1)
        gathers = _route(training)._gathers
        training.optimizer.step()
        before = gathers.unfinished()
        assert before is not None
        training.optimizer.zero_grad()
        assert gathers.unfinished() == before


@on_ranks(2, STAGES)
def test_collectives_run_beside_the_computation(stage: int) -> None:
    seen: list[str | None] = []
    with lagging("cpu") as device:
        training = Training(at(SCENES["plain"], stage=stage), device)
        route = _route(training)

        def look(*_: Any) -> None:
            seen.append(route._gathers.unfinished() or route._reductions.unfinished())

        training.step(0)
        training.step(1)
        for block in training.model.get_submodule("blocks").children():
            block.register_forward_hook(look)
            block.register_full_backward_hook(look)
        training.differentiate(2)
    # Stage 0 gathers sums behind its reductions, and nothing in forward.
    assert [name is not None for name in seen] == [stage > 0] * 3 + [True] * 3, seen
