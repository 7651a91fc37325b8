"""A pickle as plain data, and back: no class is imported and no function is called, whatever the pickle asks for.

What a pickle builds from a class or a function becomes an inert `Record`, which names it and holds what it was given.
Readers take the records that they know apart; all others are only carried. See PEP 307 and PEP 3154; opcodes of
protocols 2 to 5 only.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zerokit.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 28
"""The largest pickle that is read: it is held in memory several times over."""

_MAX_CONTAINERS = 1 << 25
"""The most in one pickle: a container takes one byte there and a hundred in memory."""

_MAX_NAME = 1 << 10
_MAX_KEY_PARTS = 64
_MAX_LARGE_KEYS = 1 << 13
_MAX_COPIED = 8
"""What is copied out of arguments, in sizes of the pickle: shared ones could be copied without end."""

_UNREADABLE = (
    *(pickle.UnpicklingError, ValueError, IndexError, TypeError, AttributeError, EOFError),
    *(struct.error, RecursionError),
)

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


_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""What Python up to protocol 3 calls for a class in a class, and Python 3.11.0 to 3.11.3 for a member of an enum."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class or function in a pickle, such as `torch._utils._rebuild_tensor_v2`; it is never imported.

    `depth`: how many of its last parts name something in the module: 2 of a class in a class, or an enum's member.
    """

    text: str
    depth: int = 1

    def of(self, part: str) -> Name:
        """The name of what is in this. Raises `ValueError` for what can be no name, or a very long one."""
        name = Name(f"{self.text}.{part}", self.depth + 1)
        if "." in part or "\n" in part or not part or len(name.text) > _MAX_NAME:
            raise ValueError(f"{part[:60]!r} is no attribute's name")
        return name


@dataclass(eq=False, slots=True)
class Record:
    """The recorded call of a class or function `name` with `args`, then `state`, `items` and `pairs`.

    `new`: its `__new__` would have been called, not the class or function itself. `depth`: see `Name`.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)
    new: bool = False
    depth: int = 1

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(reprlib.repr, self.args))})"

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: list[Any]) -> None:
        self.items.extend(values)

    @property
    def fields(self) -> dict[str, Any]:
        """The object's attributes; empty if it was not restored from a mapping."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object outside the pickle, by its persistent id."""

    identity: Any


def _unchanged(part: Any) -> Any:
    return part


def parse_pickle(
    content: bytes | memoryview, where: str, change: Callable[[Record], Any] = _unchanged
) -> Any:
    """The value of a pickle, of plain containers, numbers, text and bytes, `Name`, `Record` and `Persistent`.

    `change` gives what takes a record's place, by its name and arguments. Raises `CheckpointError`, naming `where`, for
    a pickle that is damaged, too long or of an unknown protocol.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: a pickle of {len(content)} bytes, more than the {MAX_PICKLE_BYTES} that are read"
        )
    try:
        return _Machine(bytes(content), change).load()
    except _UNREADABLE as error:
        raise CheckpointError(f"{where}: not a pickle that zerokit reads: {error}") from None


class _Machine(pickle._Unpickler):
    """Python's own machine; what would look up, call, compare or attach only notes it instead.

    Not its twin in C, which allocates what a few bytes claim.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes, change: Callable[[Record], Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._change = change
        self._most_copied = _MAX_COPIED * len(content)
        self._containers = self._copied = self._large_keys = 0

    def count(self) -> None:
        self._containers += 1
        if self._containers > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} containers")

    def find_class(self, module: str, name: str) -> Any:
        module.encode(), name.encode()  # half a surrogate pair could not be written again
        if "\n" in module or not module or len(module) > _MAX_NAME:
            raise ValueError(f"{module[:60]!r} is no module's name")
        found, *parts = name.split(".")
        made = Name(module, 0).of(found)
        for part in parts:
            made = made.of(part)
        return made

    def persistent_load(self, pid: Any) -> Any:
        return Persistent(pid)

    def _call(self, name: Any, args: Any, *, new: bool = False) -> None:
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise ValueError(f"{type(name).__name__} is called with {type(args).__name__}")
        if args and (name.text in (SIZE, "builtins.tuple", BYTES) or name.text in _BUILTINS):
            self._copied += len(_typed(args[0], (list, tuple, str)))
            if self._copied > self._most_copied:
                raise ValueError("shared parts are copied again and again")
        made: Any
        if name.text in (SIZE, "builtins.tuple"):
            kind = Size if name.text == SIZE else tuple
            made = kind(_typed(args[0], (list, tuple)) if args else ())
        elif name.text in _BUILTINS and len(args) < 2:
            made, given = _BUILTINS[name.text](), _typed(args[0] if args else (), (list, tuple))
            if isinstance(made, list):
                made.extend(given)
            elif args:
                _typed(made, dict).update((self._key(key), value) for key, value in given)
        elif name.text == BYTES and len(args) == 2 and isinstance(args[0], str):
            made = args[0].encode("latin-1")
        elif (
            name.text in _GETATTR
            and len(args) == 2
            and isinstance(args[0], Name)
            and isinstance(args[1], str)
        ):
            made = args[0].of(args[1])
        else:
            made = self._change(Record(name.text, args, new=new, depth=name.depth))
        self.stack.append(made)

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

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        pairs = target.pairs if isinstance(target, Record) else _typed(target, dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            pairs[self._key(key)] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_dict(self) -> None:
        values = self.pop_mark()
        self.stack.append({})
        self._set(values)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        # An OrderedDict's attributes, as torch's state_dict has them, are not carried.

    def load_reduce(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        self._call(name, args)

    def load_newobj(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        self._call(name, args, new=True)

    def load_newobj_ex(self) -> None:
        keywords, args, name = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._call(name, (*_typed(args, tuple), *_typed(keywords, dict).values()))


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where another type was expected")
    return value


class _Operations(dict[int, Any]):
    """What each opcode does; those that are not listed are refused."""

    def __missing__(self, code: int) -> Any:
        raise ValueError(f"opcode {code:#04x} is unknown")


def _counted(load: Callable[[_Machine], None]) -> Callable[[_Machine], None]:
    def counted(machine: _Machine) -> None:
        machine.count()
        load(machine)

    return counted


def _operation(code: int) -> Any:
    return getattr(_Machine, pickle._Unpickler.dispatch[code].__name__)


# Those of protocols 2 to 5, by their codes in Python's pickle.py; the second line makes containers.
_Machine.dispatch = _Operations(
    {code: _operation(code) for code in b"\x80\x95.(012N\x88\x89JKM\x8aGX\x8c\x8dBC\x8e)aesuqr\x94hjc\x93b"}
    | {code: _counted(_operation(code)) for code in b"]}ldt\x85\x86\x87R\x81\x92Q"}
)
# Sets become lists or tuples, whose elements are not hashed.
for _code, _like in zip(b"\x8f\x90\x91\x96", b"]et\x8e", strict=True):
    _Machine.dispatch[_code] = _Machine.dispatch[_like]


def to_pickle(value: Any, change: Callable[[Any], Any] = _unchanged) -> bytes:
    """The pickle (protocol 2) of plain data, `Name`, `Record` and `Persistent`: `parse_pickle` gives it back.

    What is shared stays shared. `change` gives what is written in place of a part. Raises `TypeError` for any other
    type, and `CheckpointError` for data that is nested hundreds of levels deep.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, change).dump(value)
    except RecursionError:
        raise CheckpointError("nested too deep to be written into a pickle") from None
    return file.getvalue()


class _Pickler(pickle._Pickler):
    """Python's own, for the types of `_SAVES` alone."""

    def __init__(self, file: io.BytesIO, change: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=2)
        self._change = change

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        super().save(self._change(value), save_persistent_id)  # type: ignore[misc]

    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, Persistent) else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) in _SAVES:
            return NotImplemented
        raise TypeError(f"{type(value).__name__} is not written into a pickle")


def _save_name(out: Any, value: Name) -> None:
    module, _, name = value.text.rpartition(".")
    if value.depth == 1:
        out.write(f"c{module}\n{name}\n".encode())
        return
    # As Python writes it in protocol 2, which knows no names in names.
    out.write(b"c__builtin__\ngetattr\n")
    out.save((Name(module, value.depth - 1), name))
    out.write(b"R")


def _save_record(out: Any, value: Record) -> None:
    out.save(Name(value.name, value.depth))
    out.save(value.args)
    out.write(b"\x81" if value.new else b"R")
    if id(value) in out.memo:  # an argument has led back to it, and it was written there
        out.write(b"0" + out.get(out.memo[id(value)][0]))
        return
    out.memoize(value)
    for item in value.items:
        out.save(item)
        out.write(b"a")
    _save_pairs(out, value.pairs)
    if value.state is not None:
        out.save(value.state)
        out.write(b"b")


def _save_ordered(out: Any, value: Ordered) -> None:
    out.write(b"ccollections\nOrderedDict\n)R")
    out.memoize(value)
    _save_pairs(out, value)


def _save_pairs(out: Any, pairs: Mapping[Any, Any]) -> None:
    for key, part in pairs.items():
        out.save(key)
        out.save(part)
        out.write(b"s")


_SAVES: dict[type, Any] = {
    **{
        kind: pickle._Pickler.dispatch[kind]
        for kind in (type(None), bool, int, float, str, tuple, list, dict)
    },
    bytes: lambda out, value: _save_record(out, Record(BYTES, (value.decode("latin-1"), "latin1"))),
    Name: _save_name,
    Record: _save_record,
    Ordered: _save_ordered,
    Size: lambda out, value: _save_record(out, Record(SIZE, (tuple(value),))),
}
_Pickler.dispatch = _SAVES
