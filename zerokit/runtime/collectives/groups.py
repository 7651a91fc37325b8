"""Process groups of zerokit's own, over the ranks of a group or some of them."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zerokit.placement import Mesh
from zerokit.runtime.torch_internals import group_name, naming_groups, timeout_for

_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many communicators have been made like a group; its ranks make them together."""


_owned: weakref.WeakKeyDictionary[
    dist.ProcessGroup, list[tuple[weakref.ref[object], dict[str, dist.ProcessGroup]]]
] = weakref.WeakKeyDictionary()
"""Who uses which gloo groups alone, by the group that they were made like, in the same order on all its ranks."""


def note_user(like: dist.ProcessGroup, user: object, groups: dict[str, dist.ProcessGroup]) -> None:
    """Record that `user` alone uses `groups`, which all ranks of `like` make in the same order."""
    _owned.setdefault(like, []).append((weakref.ref(user), groups))


def destroy_unused_groups(like: dist.ProcessGroup) -> None:
    """Destroy groups whose users are gone on all ranks of `like`, with their threads and connections. Collective."""
    entries = _owned.get(like, [])
    if not entries:
        return
    in_use = torch.tensor([user() is not None for user, _ in entries], dtype=torch.int32)
    dist.all_reduce(in_use, dist.ReduceOp.MAX, group=like)
    for (_, groups), used in zip(entries, in_use.tolist(), strict=True):
        for group in () if used else groups.values():
            _destroy(group)
    _owned[like] = [entry for entry, used in zip(entries, in_use.tolist(), strict=True) if used]


def _destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, and those that were made like it."""
    for _, groups in _owned.pop(group, ()):
        for one in groups.values():
            _destroy(one)
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


def imagine_axes(group: dist.ProcessGroup, mesh: Mesh) -> list[dist.ProcessGroup]:
    """A group for each axis, which has this rank's number and the size of the axis, and reaches nobody."""
    members = [mesh.members(axis, group.rank()) for axis in mesh.axes]
    return [dist.ProcessGroup(ranks.index(group.rank()), len(ranks)) for ranks in members]  # type: ignore[call-arg]


def timeout_of(group: dist.ProcessGroup, *devices: torch.device) -> datetime.timedelta | None:
    """The given group's, for the first of the devices that it serves: a new group would have the backend's default."""
    for device in devices:
        with suppress(RuntimeError):
            timeout = timeout_for(group, device)
            if timeout is not None:
                return timeout  # type: ignore[no-any-return]
    return None


def clone(
    group: dist.ProcessGroup,
    backend: str,
    timeout: datetime.timedelta | None,
    device: torch.device | None = None,
    members: Sequence[int] | None = None,
    *,
    small: bool = False,
) -> dist.ProcessGroup:
    """A separate communicator over the same ranks, or `members` of them, made at once for `device` if one is given.

    Every rank of `group` calls it, with the members of its own communicator. A `small` one of NCCL's takes little of
    the device's memory, and carries a few numbers at a time.
    """
    everyone = dist.get_process_group_ranks(group)
    ranks = everyone if members is None else [everyone[member] for member in members]
    whole_world = len(ranks) == dist.get_world_size()
    number = _clones[group] = _clones.get(group, 0) + 1
    part = "" if members is None else f"/{'-'.join(map(str, members))}"
    with naming_groups(f"zerokit/{group_name(group)}/{number}{part}"):
        clone = dist.new_group(
            ranks,
            backend=backend,
            timeout=timeout,
            pg_options=_nccl_options(timeout, small=small) if backend == "nccl" else None,
            use_local_synchronization=not whole_world,
            device_id=device,
        )
    assert isinstance(clone, dist.ProcessGroup)
    return clone


def _nccl_options(timeout: datetime.timedelta | None, *, small: bool) -> Any:
    options = dist.ProcessGroupNCCL.Options()  # torch without CUDA lacks it
    if timeout is not None:
        options._timeout = timeout  # new_group warns of another one
    # With a device torch 2.7.0 makes communicators that do not block, which hang now and then (pytorch#153960).
    options.config.blocking = 1
    if small:
        options.config.max_ctas = 1  # memory is linear in channels (nccl#986)
    return options
