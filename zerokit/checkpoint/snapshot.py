"""A snapshot: one rank's state at the moment of a save, and the union of the ranks' parts."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.checkpoint import rng
from zerokit.checkpoint.by_rank import Digests, Member, encode_by_rank, members_of
from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.extra import GENERATOR_PREFIX, LOCAL_STEPS, decode, encode, mapping
from zerokit.checkpoint.manifest import BUFFER_PREFIX, FROZEN, Scalars
from zerokit.checkpoint.owned import Owned
from zerokit.checkpoint.staged import device_of
from zerokit.checkpoint.state import (
    Description,
    Encoded,
    describe,
    dtype_name,
    host_bytes,
    outer_slices,
    own_slices,
    tensor_of,
)
from zerokit.checkpoint.strict import canonical
from zerokit.checkpoint.uncut import UncutFile
from zerokit.errors import CheckpointError, ZerokitWarning
from zerokit.layout import Layout
from zerokit.runtime import ZeroOptimizer, homes
from zerokit.runtime.homes import Elements, in_memory
from zerokit.runtime.host_copy import HostCopy
from zerokit.runtime.model import plain_name
from zerokit.skips import NONE_SKIPPED, Skips

Slices = dict[tuple[str, str], Elements]
"""By stream and parameter's name, flat."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a save; they must be equal on all ranks, with `copies` but for each node's `run`."""

    run: str
    step: int
    overwrite: bool
    weights_only: bool
    keep_last: object
    keep_every: object
    copies: int | None = None
    """Nodes that hold each file, in directories of their own; None in a shared directory."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Where a step's frozen parameters are: in the directory `base` beside it, to be written if `new`, or nowhere ("").

    `checksums`: the CRC-32 of each that has elements, by name.
    """

    base: str
    new: bool
    checksums: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Card:
    """The summary of its part that a rank sends to the others."""

    arguments: Arguments
    description: Description
    generators: dict[str, bytes]
    options: dict[str, str]
    """The groups' options and the loss scale, as text by their paths."""
    rank: int
    """The rank's number in the optimizer's group, where its values of `extra` belong."""
    extra: Digests | None


@dataclass(slots=True)
class Rest:
    """The data that is not sharded: members of `extra.json`, tensors of `common`, and the count of skipped steps."""

    members: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    skips: Skips = NONE_SKIPPED

    def add(self, key: str, value: Any, path: str) -> None:
        self.members[key], tensors = encode(value, path)
        self.tensors |= {name: snapshot(tensor) for name, tensor in tensors.items()}

    def add_extra(self, extra: Any, by_rank: Mapping[Member, Sequence[Any]]) -> None:
        """Add rank 0's `extra`, with all ranks' values of members in `by_rank`; tensors in them are copies."""
        self.members["user"], tensors = encode_by_rank(extra, by_rank)
        self.tensors |= {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a save."""

    card: Card
    slices: Slices
    rest: Rest
    """Filled by rank 0 only."""
    extra: Any
    """As it was given, with copies of tensors in host memory."""
    layout: Layout
    seed: int
    origin: rng.Origin | None
    apart: Apart | None
    uncut: Sequence[UncutFile] = ()
    """Files of states that this rank writes."""
    all_uncut: tuple[Uncut, ...] = ()
    """Those of all ranks."""


def take(
    optimizer: ZeroOptimizer,
    arguments: Arguments,
    extra: Any,
    outer: Mapping[str, Mapping[int, Tensor]],
    *,
    copied: bool,
    apart: Apart | None = None,
    owned: Owned | None = None,
) -> Part:
    """This rank's part; its slices are the live tensors, or copies in the optimizer's `host_copy`.

    For slices of what owners have, `owned`, there is memory only: `receive` fills it.

    Slices of frozen parameters that are `apart` are taken only if they are new there, and are copied into memory of
    their own.

    `outer` are the streams of `zerokit.LocalSteps`, if there is one.

    Raises `CheckpointError` for a state that cannot be saved.
    """
    runtime = optimizer.runtime
    rank = runtime.collectives.position
    if optimizer.refusal:
        raise CheckpointError(f"this state cannot be saved: {optimizer.refusal}")
    held = list(own_slices(runtime, rank, weights_only=arguments.weights_only))
    held += outer_slices(runtime.layout, rank, outer)
    owned = owned or Owned({}, ())
    held += owned.places(runtime, rank)
    uncut = list(owned.files(runtime, rank))
    description = describe(
        runtime, held, weights_only=arguments.weights_only, apart=owned.kinds_apart(runtime)
    )
    frozen = [] if apart is None else [one for one in held if one.kind == FROZEN]
    if frozen:
        held = [one for one in held if one.kind != FROZEN]
    rest, options = Rest(skips=runtime.control.skips), {}
    extra = _copied(extra)
    if rank == 0:
        _warn_of_extra_state(runtime.model)
        rest.members |= {"step": arguments.step, "user": None}  # until ranks have compared theirs
        rest.tensors |= {
            BUFFER_PREFIX + name: snapshot(buffer, f"buffer {name}")
            for name, buffer in persistent_buffers(runtime.model).items()
        }
    if not arguments.weights_only:
        options = _options(optimizer)
        if rank == 0:
            if optimizer.local_steps is not None:
                rest.add(LOCAL_STEPS, optimizer.local_steps.plain_state(), LOCAL_STEPS)
            rest.add("groups", _groups(optimizer), "groups")
            rest.members["scaler"] = _scaler(optimizer)
    tensors = [one.tensor for one in held]
    if copied:
        every = [*tensors, *(tensor for file in uncut for tensor in file.tensors)]
        copies = iter(_copies(optimizer, every))
        tensors = [next(copies) for _ in tensors]
        uncut = [replace(file, tensors=[next(copies) for _ in file.tensors]) for file in uncut]
    else:
        tensors = [
            torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, Tensor) and tensor.is_meta
            else tensor
            for tensor in tensors
        ]
    slices = {(one.kind, one.part.parameter.name): tensor for one, tensor in zip(held, tensors, strict=True)}
    for one in frozen if apart is not None and apart.new else ():
        # Once in a training: the buffer that all saves use has no room for it.
        live = in_memory(one.tensor)
        slices[one.kind, one.part.parameter.name] = snapshot(live) if copied else live
    generators = {} if arguments.weights_only else rng.capture(runtime.collectives.device)
    digests = None
    if extra is not None and runtime.collectives.world > 1:
        digests = {name: _digest(value) for name, value in members_of(extra).items()}
    card = Card(arguments, description, generators, options, runtime.collectives.rank, digests)
    seed = torch.initial_seed() % 2**64
    return Part(
        card,
        slices,
        rest,
        extra,
        optimizer.layout,
        seed,
        rng.ORIGINS.get(optimizer),
        apart,
        uncut,
        owned.uncut,
    )


def receive(optimizer: ZeroOptimizer, part: Part, owned: Owned) -> None:
    """Fill the slices of what owners have. Collective."""
    runtime = optimizer.runtime
    for one in owned.spread(runtime, runtime.collectives.position):
        memory = part.slices[one.kind, one.part.parameter.name]
        assert isinstance(memory, Tensor)
        memory.copy_(in_memory(one.tensor))


def _copied(extra: Any) -> Any:
    """The value with its tensors copied into host memory. Raises `CheckpointError` for what cannot be saved."""
    plain, tensors = encode(extra)
    return decode(plain, {name: snapshot(tensor) for name, tensor in tensors.items()})


def _digest(value: Any) -> str:
    plain, tensors = encode(value)
    total = hashlib.sha256(canonical(plain).encode())
    for tensor in map(torch.as_tensor, tensors.values()):
        total.update(f"{tensor.dtype} {list(tensor.shape)}".encode() + host_bytes(tensor))
    return total.hexdigest()


def snapshot(value: Any, what: str = "a tensor") -> Tensor:
    """A tensor or array as a dense tensor in separate host memory.

    Raises `CheckpointError`, naming `what`, for a dtype that cannot be saved.
    """
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    dtype_name(tensor, what)
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _copies(optimizer: ZeroOptimizer, elements: Sequence[Elements]) -> list[Elements]:
    """Copies; for a tensor on `meta` memory alone. The host waits until a device has made them.

    What is away is kept where it is.
    """
    tensors = [one for one in elements if isinstance(one, Tensor)]
    copies = iter(_host_copies(optimizer, tensors))
    if len(tensors) == len(elements):
        return list(copies)
    keep = optimizer.runtime.home.keep()
    return [next(copies) if isinstance(one, Tensor) else keep(one) for one in elements]


def _host_copies(optimizer: ZeroOptimizer, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors in the optimizer's buffer."""
    size, memory = HostCopy.size_of(tensors), optimizer.host_copy
    if memory is None or memory.nbytes < size:  # weights alone need less
        memory = optimizer.host_copy = None  # before the next is made
        streams = homes.streams_for(device_of(tensors))
        memory = HostCopy(size, streams[1] if streams else None)
    copies = memory.fill(tensors)
    optimizer.host_copy = memory
    return copies


def complete(
    part: Part,
    cards: Sequence[Card],
    scalars: Mapping[Scalars, bytes],
    values: Mapping[str, Mapping[str, Encoded]],
) -> None:
    """Add the data of all ranks to rank 0's part."""
    rest, origin = part.rest, part.origin
    for scalar, data in scalars.items():
        shape = (len(scalar.parameters), *scalar.shape)
        rest.tensors[f"optimizer/{scalar.kind}"] = tensor_of(data, scalar.dtype, shape)
    states = [card.generators for card in cards]
    if origin is not None and origin.digests == [rng.digest(state) for state in states]:
        # Derived by a load, and unused since: written as what they were derived from.
        record, stacked = origin.record, origin.stacked
    else:
        stacked = rng.stack(states)
        record = {"world": len(states), "seed": part.seed, "step": part.card.arguments.step}
    rest.members["rng"] = record
    rest.tensors |= {GENERATOR_PREFIX + name: tensor for name, tensor in stacked.items()}
    rest.members["values"] = mapping(
        {kind: mapping({name: one.plain for name, one in held.items()}) for kind, held in values.items()}
    )
    for one in (one for held in values.values() for one in held.values()):
        rest.tensors |= {
            name: tensor_of(data, dtype, shape) for name, (dtype, shape, data) in one.tensors.items()
        }


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that checkpoints hold, each once, under its first name."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {plain_name(name): buffer for name, buffer in model.named_buffers() if name not in transient}


def _warn_of_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"module {plain_name(name)!r} has a get_extra_state(), whose value is not in the checkpoint: give it "
                "to save() in extra=, and to set_extra_state() after load()",
                ZerokitWarning,
                stacklevel=2,
            )
            return


def require_agreement(cards: Sequence[Card]) -> None:
    """Raise `CheckpointError`, naming the first difference, unless all ranks request the same save.

    Options of the groups must be equal as well: they are saved once, and a rank with others trains another model.
    """
    shared = all(card.arguments.copies is None for card in cards)
    for key in (
        *("copies", "step", *(["run"] if shared else [])),
        *("overwrite", "weights_only", "keep_last", "keep_every"),
    ):
        values = [repr(getattr(card.arguments, key)) for card in cards]
        require_equal("the run directory" if key == "run" else key, values)
    for path in sorted({path for card in cards for path in card.options}):
        require_equal(
            path,
            [card.options.get(path, "absent") for card in cards],
            "set it alike on every rank, schedulers too: only one of them can be saved, and the ranks train with "
            "different ones now",
        )


def require_equal(
    name: str, values: Sequence[str], advice: str = "save() must be called alike on all"
) -> None:
    """Raise `CheckpointError` where ranks have different values of what is called `name`."""
    if len(set(values)) == 1:
        return
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    texts = (f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}" for value, who in ranks.items())
    raise CheckpointError(f"{name} differs between ranks: {'; '.join(texts)}: {advice}")


def _options(optimizer: ZeroOptimizer) -> dict[str, str]:
    """Every option of the groups and of the loss scale by its path, as text: equal for equal options only."""
    texts = {}
    for number, group in enumerate(_groups(optimizer)):
        for key, value in group.items():
            shown = f"{value.dtype} {value.tolist()}" if isinstance(value, Tensor) else repr(value)
            texts[f"option {key!r} of parameter group {number}"] = shown
    return texts | {
        f"the loss scale's {key}": str(value) for key, value in (_scaler(optimizer) or {}).items()
    }


def _groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _scaler(optimizer: ZeroOptimizer) -> dict[str, Any] | None:
    if optimizer.scaler is None:
        return None
    # As text, exactly: JSON numbers are read in many ways.
    return {"value": optimizer.scaler.value.hex(), "good_steps": optimizer.scaler.good_steps}
