"""A disk that fails at a given call, and what a crash after any call leaves behind.

`Recording` writes every change of all ranks and threads to one journal, in the order in which they happened. From it
`crashes` derives the directory tree after each of the calls, in each of the `WAYS` of crashing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zerokit import files

T = TypeVar("T")

Tree = dict[str, bytes | None]
"""What is in a directory: paths relative to it, parents before children; None for a directory."""

CALLS = (
    *("mkdir", "create", "write", "allocate", "truncate", "sync", "sync_directory"),
    *("rename", "rename_new", "exchange", "unlink", "rmdir"),
)
SPACE = CALLS[:5]
"""Those that a full disk refuses."""

WAYS = ("killed", "power cut", "zeroed", "mixed")
"""How a crash treats what was not synced.

Killed: all is kept. Power cut: nothing is, neither contents nor names. Zeroed: names are kept, and contents become
zeros. Mixed: each directory is as it was at some moment since its last sync, each file kept, zeroed or empty.
"""


class Unsynced(files.System):
    """Syncs nothing: for work whose tree is looked at and thrown away."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class Observed(Unsynced):
    """Every call passes through `around`. `exchanges=False`: on this file system no directories change places."""

    def __init__(self, *, exchanges: bool = True) -> None:
        self._exchanges = exchanges

    def around(self, name: str, call: Callable[[], T], *arguments: Any) -> T:
        """Make the call `name`, or do something else."""
        return call()


def _observed(name: str) -> Callable[..., Any]:
    def method(self: Observed, *arguments: Any, **named: Any) -> Any:
        if name == "exchange" and not self._exchanges:
            return False
        call = partial(getattr(super(Observed, self), name), *arguments, **named)
        return self.around(name, call, *arguments)

    return method


for _name in CALLS:
    setattr(Observed, _name, _observed(_name))


class Counting(Observed):
    """Does something instead of its `number`-th call, counted from 1; `reached` tells whether there were so many."""

    def __init__(self, number: int, *, exchanges: bool = True) -> None:
        super().__init__(exchanges=exchanges)
        self._number, self._calls = number, 0
        self._lock = threading.Lock()

    @property
    def reached(self) -> bool:
        return self._calls >= self._number

    def instead(self) -> None:
        raise NotImplementedError

    def around(self, name: str, call: Callable[[], T], *arguments: Any) -> T:
        with self._lock:
            self._calls += 1
            now = self._calls == self._number
        if now:
            self.instead()
        return call()


class Failing(Counting):
    """The `number`-th call fails; with `lasting`, those of these names from there on."""

    def __init__(
        self,
        number: int,
        code: int = errno.EIO,
        *,
        lasting: Collection[str] = (),
        exchanges: bool = True,
    ) -> None:
        super().__init__(number, exchanges=exchanges)
        self._code, self._lasting = code, lasting

    def instead(self) -> None:
        raise OSError(self._code, os.strerror(self._code))

    def around(self, name: str, call: Callable[[], T], *arguments: Any) -> T:
        if self.reached and name in self._lasting:
            self.instead()
        return super().around(name, call, *arguments)


# --- the journal -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A change that succeeded. `inode` tells which file the calls on descriptors are for."""

    name: str
    paths: tuple[str, ...] = ()
    inode: int = 0
    number: int = 0
    """A size or an offset."""
    data: bytes = b""


class Recording(Observed):
    """Appends every change below `root` to the file `journal`, which other ranks append to as well.

    One change at a time, of all of them: the journal's order is that in which they happened.
    """

    def __init__(self, root: Path, journal: Path, *, exchanges: bool = True) -> None:
        super().__init__(exchanges=exchanges)
        self._root, self._journal = root.resolve(), journal
        self._lock = threading.Lock()

    def around(self, name: str, call: Callable[[], T], *arguments: Any) -> T:
        with self._lock, self._journal.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = call()
            if result is not False:  # an exchange that the file system has not
                pickle.dump(self._call(name, result, arguments), file)
        return result

    def _call(self, name: str, result: object, arguments: tuple[Any, ...]) -> Call:
        if name in ("write", "allocate", "truncate", "sync"):
            inode = os.fstat(arguments[0]).st_ino
            if name != "write":
                return Call(name, inode=inode, number=sum(arguments[1:]))
            assert isinstance(result, int)
            data = b"".join(bytes(buffer) for buffer in arguments[1])[:result]
            return Call(name, inode=inode, number=arguments[2], data=data)
        paths = tuple(
            str((path.absolute().parent.resolve() / path.name).relative_to(self._root)) for path in arguments
        )
        inode = 0
        if name == "create" and isinstance(result, int):
            inode = os.fstat(result).st_ino
        return Call(name, paths, inode)


def begin_journal(root: Path, journal: Path) -> None:
    """Note what is there before the first call."""
    journal.write_bytes(pickle.dumps(read_tree(root)))


def read_journal(journal: Path) -> tuple[Tree, list[Call]]:
    """What was there, and what was done to it."""
    calls = []
    with journal.open("rb") as file:
        tree = pickle.load(file)
        while True:
            try:
                calls.append(pickle.load(file))
            except EOFError:
                return tree, calls


# --- the trees ---------------------------------------------------------------------------------------------


def read_tree(root: Path) -> Tree:
    """A directory with all that it holds."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_tree(tree: Tree, root: Path) -> None:
    """Make the directory `root` so."""
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


@dataclass(eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None


@dataclass(eq=False)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    versions: list[dict[str, _File | _Folder]] = field(default_factory=lambda: [{}])
    """From its last sync on; the last one is `entries`."""

    def changed(self) -> None:
        self.versions.append(dict(self.entries))

    def sync(self) -> None:
        self.versions = [dict(self.entries)]


class _Disk:
    """Names and contents, and what of them is durable."""

    def __init__(self, tree: Tree) -> None:
        self._root = _Folder()
        self._inodes: dict[int, _File] = {}
        folders = [self._root]
        for name, content in tree.items():
            folder, last = self._find(name)
            made = _Folder() if content is None else _File(bytearray(content), content)
            folder.entries[last] = made
            if isinstance(made, _Folder):
                folders.append(made)
        for folder in folders:
            folder.sync()

    def _find(self, path: str) -> tuple[_Folder, str]:
        *parents, last = Path(path).parts
        folder = self._root
        for name in parents:
            inner = folder.entries[name]
            assert isinstance(inner, _Folder), path
            folder = inner
        return folder, last

    def apply(self, call: Call) -> None:
        if call.paths:
            self._apply_to_names(call.name, [self._find(path) for path in call.paths if path != "."], call)
            return
        file = self._inodes[call.inode]
        if call.name == "sync":
            file.synced = bytes(file.content)
            return
        size = call.number + len(call.data)
        file.content += bytes(max(0, size - len(file.content)))
        if call.name == "truncate":
            del file.content[size:]
        file.content[call.number : size] = call.data

    def _apply_to_names(self, name: str, places: list[tuple[_Folder, str]], call: Call) -> None:
        if name == "sync_directory":
            folder = places[0][0].entries[places[0][1]] if places else self._root
            assert isinstance(folder, _Folder), call
            folder.sync()
            return
        (one, first), (other, second) = places[0], places[-1]
        match name:
            case "mkdir":
                one.entries[first] = _Folder()
            case "create":
                one.entries[first] = self._inodes[call.inode] = _File()
            case "rename" | "rename_new":
                other.entries[second] = one.entries.pop(first)
            case "exchange":
                one.entries[first], other.entries[second] = other.entries[second], one.entries[first]
            case "unlink" | "rmdir":
                del one.entries[first]
            case _:
                raise AssertionError(call)
        one.changed()
        if other is not one:
            other.changed()

    def after(self, way: str, choose: random.Random) -> Tree:
        """What a crash leaves now."""
        tree: Tree = {}

        def walk(folder: _Folder, prefix: str) -> None:
            entries = folder.entries
            if way == "power cut":
                entries = folder.versions[0]
            elif way == "mixed":
                entries = choose.choice(folder.versions)
            for name, node in sorted(entries.items()):
                if isinstance(node, _Folder):
                    tree[prefix + name] = None
                    walk(node, f"{prefix}{name}/")
                else:
                    tree[prefix + name] = self._content(node, way, choose)

        walk(self._root, "")
        return tree

    @staticmethod
    def _content(file: _File, way: str, choose: random.Random) -> bytes:
        kept, durable = bytes(file.content), file.synced
        if way == "killed" or durable == kept:
            return kept
        zeroed = bytes(len(kept)) if durable is None else durable
        if way == "zeroed":
            return zeroed
        lost = b"" if durable is None else durable
        return lost if way == "power cut" else choose.choice([kept, zeroed, lost])


@dataclass(frozen=True)
class Crash:
    """After the first `calls` changes, of `total` in all."""

    calls: int
    total: int
    way: str
    tree: Tree

    def __str__(self) -> str:
        return f"{self.way} after {self.calls} of {self.total} calls"


def crashes(journal: Path) -> Iterator[Crash]:
    """Every state that a crash may leave, each once: after no call, after each, in every way."""
    tree, calls = read_journal(journal)
    disk, seen = _Disk(tree), set()
    for done in range(len(calls) + 1):
        if done:
            disk.apply(calls[done - 1])
        for way in WAYS:
            left = disk.after(way, random.Random(done))
            # The end counts in every way: what was reported as done must be durable.
            key = (tuple(left.items()), done == len(calls))
            if key not in seen:
                seen.add(key)
                yield Crash(done, len(calls), way, left)
