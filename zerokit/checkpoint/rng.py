"""Random number generators: one record of all ranks' states, and seeds for new ranks.

The states belong to the world size that saved them. At another one each rank derives a seed of its own from the first
rank's seed, the step and its rank, so that no two ranks draw the same numbers.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Origin:
    """The seed from which all ranks' generators were derived, and digests of their states then."""

    record: dict[str, Any]
    stacked: dict[str, Tensor]
    digests: list[str]


ORIGINS: WeakKeyDictionary[object, Origin] = WeakKeyDictionary()
"""By optimizer. While no random number is drawn, a save writes the record again that the load has read."""

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624IiId")


def capture(device: torch.device) -> dict[str, bytes]:
    """This process's generators: torch's (and the device's), Python's, and NumPy's where it is in use."""
    states = {"torch": torch.get_rng_state().numpy().tobytes()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).cpu().numpy().tobytes()
    _, words, gauss = random.getstate()
    states["python"] = _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = _NUMPY.pack(*map(int, keys), position, has_gauss, cached)
    return states


def restore(states: Mapping[str, bytes], device: torch.device) -> None:
    """Set this process's generators to what `capture` returned; those that are not listed stay as they are."""
    if "torch" in states:
        torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    if "python" in states:
        *words, has_gauss, gauss = _PYTHON.unpack(states["python"])
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        *keys, position, has_gauss, cached = _NUMPY.unpack(states["numpy"])
        if not 0 <= position <= len(keys):  # NumPy would read there
            raise ValueError(f"NumPy's generator has no position {position}")
        numpy.random.set_state(("MT19937", keys, position, has_gauss, cached))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed this process's generators for a rank that the saved states do not fit."""
    digest = hashlib.sha256(f"zerokit:{seed}:{step}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    random.seed(digest[8:16])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(digest[16:20], "little"))


def digest(states: Mapping[str, bytes]) -> str:
    """Equal for equal states."""
    total = hashlib.sha256()
    for name in sorted(states):
        total.update(name.encode() + states[name])
    return total.hexdigest()


def stack(states: Sequence[Mapping[str, bytes]]) -> dict[str, Tensor]:
    """uint8 [world, bytes] of those generators that every rank has, of one size."""
    return {
        name: torch.stack([_tensor(state[name]) for state in states])
        for name in sorted(states[0])
        if all(len(state.get(name, b"")) == len(states[0][name]) for state in states)
    }


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
