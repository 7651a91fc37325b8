"""A pickle as plain data, and back: no class is imported and no function is called, whatever the pickle asks for.

What a pickle builds from a class or a function becomes an inert `Record`, which names it and holds what it was given.
Readers take the records that they know apart; all others are only carried. The stack machine is our own, because
the library's imports what it is asked for and allocates what a few bytes claim. See PEP 307 and PEP 3154; opcodes of
protocols 2 to 5 only.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zerokit.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 28
"""The largest pickle that is read: it is held in memory several times over."""

_MAX_CONTAINERS = 1 << 25
"""The most in one pickle: a container takes one byte there and a hundred in memory."""

_MAX_DEPTH = 100
_MAX_KEY_PARTS = 64
_MAX_LARGE_KEYS = 1 << 13
_MAX_COPIED = 8
"""What is copied out of arguments, in sizes of the pickle: shared ones could be copied without end."""

ORDERED = "collections.OrderedDict"
SIZE = "torch.Size"
BYTES = "_codecs.encode"
"""How protocol 2 writes bytes: as text of the code points 0 to 255, and a call that encodes it."""


class Ordered(dict[Any, Any]):
    """A value that was an `OrderedDict` and is written as one."""


class Size(tuple[Any, ...]):
    """A value that was a `torch.Size` and is written as one."""


_BUILTINS: dict[str, Callable[[], Any]] = {
    ORDERED: Ordered,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": list,
    "__builtin__.set": list,
    "builtins.bytes": bytes,
    "__builtin__.bytes": bytes,
}
"""Containers without arguments: they become plain ones that the following opcodes fill."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class or function in a pickle, such as `torch._utils._rebuild_tensor_v2`; it is never imported."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
    """The recorded call of a class or function `name` with `args`, then `state`, `items` and `pairs`.

    `new`: its `__new__` would have been called, not the class or function itself.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)
    new: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The object's attributes; empty if it was not restored from a mapping."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object outside the pickle, by its persistent id."""

    identity: Any


def parse_pickle(content: bytes | memoryview, where: str) -> Any:
    """The value of a pickle, of plain containers, numbers, text and bytes, `Name`, `Record` and `Persistent`.

    Raises `CheckpointError`, naming `where`, for a pickle that is damaged, too long or of an unknown protocol.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: a pickle of {len(content)} bytes, more than the {MAX_PICKLE_BYTES} that are read"
        )
    try:
        return _Machine(bytes(content)).run()
    except (ValueError, IndexError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{where}: not a pickle that zerokit reads: {error}") from None


class _Machine:
    """The stack, the memo and the position in the bytes."""

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """A stack for each mark: what lies below it."""
        self._memo: dict[int, Any] = {}
        self._containers = self._copied = self._large_keys = 0

    def run(self) -> Any:
        while True:
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                return self._stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"opcode {code:#04x} at byte {self._position - 1} is unknown")
            operation(self)

    def _take(self, size: int) -> bytes:
        start, self._position = self._position, self._position + size
        if self._position > len(self._content):
            raise ValueError(f"truncated: {size} bytes expected at byte {start} of {len(self._content)}")
        return self._content[start : self._position]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, form: str) -> str:
        return self._take(self._number(form)).decode("utf-8", "surrogatepass")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._position)
        return self._take(end - self._position + 1)[:-1].decode()

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        if not self._below:
            raise ValueError("a mark is missing")
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _push_tuple(self, count: int) -> None:
        taken = tuple(self._stack[len(self._stack) - count :])
        if len(taken) != count:
            raise ValueError("the stack is empty")
        del self._stack[-count:]
        self._make(taken)

    def _make(self, value: Any) -> None:
        """Push a new container."""
        self._containers += 1
        if self._containers > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} containers")
        self._stack.append(value)

    def _call(self, name: Any, args: Any, *, new: bool = False) -> None:
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise ValueError(f"{type(name).__name__} is called with {type(args).__name__}")
        if args and (name.text in (SIZE, "builtins.tuple", BYTES) or name.text in _BUILTINS):
            self._copied += len(_typed(args[0], (list, tuple, str)))
            if self._copied > _MAX_COPIED * len(self._content):
                raise ValueError("shared parts are copied again and again")
        if name.text in (SIZE, "builtins.tuple"):
            kind = Size if name.text == SIZE else tuple
            self._make(kind(_typed(args[0], (list, tuple)) if args else ()))
        elif name.text in _BUILTINS and not args:
            self._make(_BUILTINS[name.text]())
        elif name.text in _BUILTINS and len(args) == 1:
            given = _typed(args[0], (list, tuple))
            made = _BUILTINS[name.text]()
            if isinstance(made, list):
                made.extend(given)
            else:
                _typed(made, dict).update((self._key(key), value) for key, value in given)
            self._make(made)
        elif name.text == BYTES and len(args) == 2 and isinstance(args[0], str):
            self._stack.append(args[0].encode("latin-1"))
        else:
            self._make(Record(name.text, args, new=new))

    def _key(self, key: Any) -> Any:
        """A key of a mapping. Nested and long tuples, and many numbers that may have one hash, would take for ever."""
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) > _MAX_KEY_PARTS:
            raise ValueError(f"a key of {len(parts)} parts")
        for part in parts:
            if not (part is None or isinstance(part, (str, int, float, bytes, Record, Name))):
                raise ValueError(f"{type(part).__name__} is used as a key")
            self._large_keys += isinstance(part, int) and abs(part) >= sys.hash_info.modulus
        if self._large_keys > _MAX_LARGE_KEYS:
            raise ValueError(f"more than {_MAX_LARGE_KEYS} numbers of over 60 bits are used as keys")
        return key

    # One method an opcode or family of opcodes, in the order of the table below.

    def _skip_protocol(self) -> None:
        protocol = self._take(1)[0]
        if not 2 <= protocol <= 5:
            raise ValueError(f"protocol {protocol} is unknown")

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Record):
            target.items.extend(values)
        else:
            raise ValueError(f"elements are added to {type(target).__name__}")

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        pairs = target.pairs if isinstance(target, Record) else _typed(target, dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            pairs[self._key(key)] = value

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _append_one(self) -> None:
        value = self._stack.pop()
        self._append([value])

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        # An OrderedDict's attributes, as torch's state_dict has them, are not carried.

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(Name(f"{module}.{name}"))

    def _stack_global(self) -> None:
        name, module = _typed(self._stack.pop(), str), _typed(self._stack.pop(), str)
        self._stack.append(Name(f"{module}.{name}"))

    def _reduce(self) -> None:
        args, name = self._stack.pop(), self._stack.pop()
        self._call(name, args)

    def _new(self) -> None:
        args, name = self._stack.pop(), self._stack.pop()
        self._call(name, args, new=True)

    def _new_with_keywords(self) -> None:
        keywords, args, name = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._call(name, (*_typed(args, tuple), *_typed(keywords, dict).values()))

    def _remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _dict(self) -> None:
        values = self._since_mark()
        self._make({})
        self._set(values)

    def _push(self, value: Any) -> None:
        self._stack.append(value)


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where another type was expected")
    return value


_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m._skip_protocol(),
    0x95: lambda m: m._number("<Q"),  # FRAME
    ord("("): lambda m: m._mark(),
    ord("0"): lambda m: m._pop(),
    ord("1"): lambda m: m._since_mark(),
    ord("2"): lambda m: m._push(m._stack[-1]),
    ord("N"): lambda m: m._push(None),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    ord("J"): lambda m: m._push(m._number("<i")),
    ord("K"): lambda m: m._push(m._number("<B")),
    ord("M"): lambda m: m._push(m._number("<H")),
    0x8A: lambda m: m._push(int.from_bytes(m._take(m._number("<B")), "little", signed=True)),
    ord("G"): lambda m: m._push(m._number(">d")),
    ord("X"): lambda m: m._push(m._text("<I")),
    0x8C: lambda m: m._push(m._text("<B")),
    0x8D: lambda m: m._push(m._text("<Q")),
    ord("B"): lambda m: m._push(m._take(m._number("<I"))),
    ord("C"): lambda m: m._push(m._take(m._number("<B"))),
    0x8E: lambda m: m._push(m._take(m._number("<Q"))),
    0x96: lambda m: m._push(m._take(m._number("<Q"))),
    ord("]"): lambda m: m._make([]),
    ord("}"): lambda m: m._make({}),
    ord(")"): lambda m: m._push(()),
    0x8F: lambda m: m._make([]),  # EMPTY_SET
    ord("a"): lambda m: m._append_one(),
    ord("e"): lambda m: m._append(m._since_mark()),
    0x90: lambda m: m._append(m._since_mark()),  # ADDITEMS
    ord("s"): lambda m: m._set_one(),
    ord("u"): lambda m: m._set(m._since_mark()),
    ord("t"): lambda m: m._make(tuple(m._since_mark())),
    0x91: lambda m: m._make(tuple(m._since_mark())),  # FROZENSET
    0x85: lambda m: m._push_tuple(1),
    0x86: lambda m: m._push_tuple(2),
    0x87: lambda m: m._push_tuple(3),
    ord("l"): lambda m: m._make(m._since_mark()),
    ord("d"): lambda m: m._dict(),
    ord("q"): lambda m: m._remember(m._number("<B")),
    ord("r"): lambda m: m._remember(m._number("<I")),
    0x94: lambda m: m._remember(len(m._memo)),
    ord("h"): lambda m: m._push(m._memo[m._number("<B")]),
    ord("j"): lambda m: m._push(m._memo[m._number("<I")]),
    ord("c"): lambda m: m._global(),
    0x93: lambda m: m._stack_global(),
    ord("R"): lambda m: m._reduce(),
    0x81: lambda m: m._new(),
    0x92: lambda m: m._new_with_keywords(),
    ord("b"): lambda m: m._build(),
    ord("Q"): lambda m: m._make(Persistent(m._stack.pop())),
}


def mapped(root: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of plain data with `change` applied to each part that is not a plain container; shared parts stay shared.

    Raises `ValueError` for data that is nested more than 100 deep.
    """
    seen: dict[int, Any] = {}
    kept: list[Any] = []

    def visit(value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (str, bytes, int, float)):
            return value
        if id(value) in seen:
            return seen[id(value)]
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        kept.append(value)  # its identity must not be taken by another object
        copy: Any
        if isinstance(value, dict):
            seen[id(value)] = copy = type(value)()
            for key, part in value.items():
                copy[key] = visit(part, depth + 1)
        elif isinstance(value, list):
            seen[id(value)] = copy = []
            copy.extend(visit(part, depth + 1) for part in value)
        elif isinstance(value, tuple):
            copy = type(value)(visit(part, depth + 1) for part in value)
        elif (changed := change(value)) is not value:
            copy = visit(changed, depth + 1)
        elif isinstance(value, Record):
            seen[id(value)] = copy = Record(value.name, new=value.new)
            copy.args = visit(value.args, depth + 1)
            copy.state = visit(value.state, depth + 1)
            copy.items = visit(value.items, depth + 1)
            copy.pairs = visit(value.pairs, depth + 1)
        else:
            copy = value
        seen[id(value)] = copy
        return copy

    return visit(root, 0)
