"""Plain data as a pickle: the reverse of `pickles`."""

from __future__ import annotations

import struct
from typing import Any

from zerokit.checkpoint.formats.pickles import BYTES, SIZE, Name, Ordered, Persistent, Record, Size


def to_pickle(value: Any) -> bytes:
    """The pickle (protocol 2) of plain data, `Name`, `Record` and `Persistent`: `parse_pickle` gives it back.

    What is shared stays shared. Raises `TypeError` for any other type.
    """
    writer = _Writer()
    writer.write(value)
    return bytes(writer.out + b".")


class _Writer:
    """Containers are remembered, so that each is written once: shared ones could grow without end."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[int, int] = {}
        self._kept: list[Any] = []
        """What is in the memo: its identity must not be taken by another object."""

    def write(self, value: Any) -> None:
        out, kind = self.out, type(value)
        if value is None or kind is bool:
            out += b"N" if value is None else b"\x88" if value else b"\x89"
        elif kind is int:
            if -(1 << 31) <= value < 1 << 31:
                out += b"J" + struct.pack("<i", value)
            else:
                content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                out += b"\x8a" + bytes([len(content)]) + content
        elif kind is float:
            out += b"G" + struct.pack(">d", value)
        elif kind is str:
            content = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(content)) + content
        elif kind is bytes:
            self.write(Record(BYTES, (value.decode("latin-1"), "latin1")))
        elif kind is Name:
            module, _, name = value.text.rpartition(".")
            out += f"c{module}\n{name}\n".encode()
        elif id(value) in self._memo:
            out += b"j" + struct.pack("<I", self._memo[id(value)])
        else:
            self._container(value)

    def _container(self, value: Any) -> None:
        out, kind = self.out, type(value)
        if kind is tuple:
            if value:
                out += b"("
                for part in value:
                    self.write(part)
            if id(value) in self._memo:  # a part has led back to it, and it was written there
                out += b"1j" + struct.pack("<I", self._memo[id(value)])
                return
            out += b"t" if value else b")"
            self._remember(value)
        elif kind is list:
            out += b"]"
            self._remember(value)
            self._items(value)
        elif kind is dict or kind is Ordered:
            out += b"}" if kind is dict else b"ccollections\nOrderedDict\n)R"
            self._remember(value)
            self._pairs(value)
        elif kind is Size:
            self.write(Record(SIZE, (tuple(value),)))
        elif kind is Record:
            self.write(Name(value.name))
            self.write(value.args)
            out += b"\x81" if value.new else b"R"
            if id(value) in self._memo:  # as above, by way of an argument
                out += b"0j" + struct.pack("<I", self._memo[id(value)])
                return
            self._remember(value)
            self._items(value.items)
            self._pairs(value.pairs)
            if value.state is not None:
                self.write(value.state)
                out += b"b"
        elif kind is Persistent:
            self.write(value.identity)
            out += b"Q"
        else:
            raise TypeError(f"{kind.__name__} is not written into a pickle")

    def _remember(self, value: Any) -> None:
        number = self._memo[id(value)] = len(self._memo)
        self._kept.append(value)
        self.out += b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def _items(self, items: list[Any]) -> None:
        if items:
            self.out += b"("
            for part in items:
                self.write(part)
            self.out += b"e"

    def _pairs(self, pairs: dict[Any, Any]) -> None:
        if pairs:
            self.out += b"("
            for key, part in pairs.items():
                self.write(key)
                self.write(part)
            self.out += b"u"
