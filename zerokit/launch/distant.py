"""Ranks on another machine: the launcher's agent for them, and what serves it there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerokit.errors import ZerokitError
from zerokit.launch import frames
from zerokit.launch.agents import POLL_SECONDS, await_end
from zerokit.launch.failures import Failure, name_node
from zerokit.launch.frames import MOST_LOG_BYTES, Peer, pack, put_file
from zerokit.launch.ranks import Ranks, World

_FILES_SECONDS = 0.5
_END_SECONDS = 10.0


class DistantAgent:
    """The ranks of a node beyond a connection, as an `Agent`.

    `host` is None where that is this machine, and `hello` as long as the node has not said what it is.
    """

    def __init__(
        self, peer: Peer, node: int, host: str | None, log_dir: Path, hello: Mapping[str, Any] | None = None
    ) -> None:
        self.peer, self.node, self.host, self.hello = peer, node, host, hello
        self._log_dir = log_dir
        self.where = name_node(node, host)
        self.failures: list[Failure] = []
        self.code: int | None = None
        self.trouble: str | None = None

    def poll(self) -> int | None:
        try:
            while self.code is None and (message := self.peer.hear()) is not None:
                self.take(*message)
            if self.code is None and self.hello is not None and self.peer.silent:
                self.fail(
                    f"{self.where}: nothing was heard of it for {frames.SILENCE_SECONDS:g} s: its program is stopped, "
                    "or its machine or the network between is gone"
                )
        except EOFError:
            self.fail(self.lost())
        except (KeyError, TypeError, ValueError, OSError, ZerokitError) as error:
            self.fail(f"{self.where}: what it sent could not be kept: {error}")
        return self.code

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        """A message."""
        if kind == "hello":
            self.hello = content
        elif kind == "file":
            put_file(self._log_dir, content)
        elif kind == "exit":
            self.failures = [replace(Failure(**one), host=self.host) for one in content["failures"]]
            self.code = int(content["code"])

    def fail(self, trouble: str) -> None:
        """End with the reason."""
        self.code, self.trouble = 1, trouble

    def lost(self) -> str:
        """The reason of a connection that has ended."""
        return f"{self.where} was lost while its ranks ran: the connection ended"

    def send_signal(self, number: int) -> None:
        self.peer.say("signal", number=number)

    def end(self) -> None:
        if self.poll() is None:
            self.send_signal(9)
            await_end([self], _END_SECONDS)


def launch_frame(
    world: World, log_dir: Path, command: Sequence[str], *, follow: bool = False
) -> dict[str, Any]:
    """The content of `start`: what to run, with the files of the launch's folder."""
    files = {
        path.name: pack(path.read_bytes())
        for path in log_dir.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }
    about = {"command": list(command), "folder": str(log_dir), "files": files, "follow": follow}
    return {"world": asdict(world), **about}


def hear(peer: Peer) -> tuple[str, dict[str, Any]] | None:
    """The launcher's next message, if any; raises `EOFError` if it is gone or says nothing any more."""
    message = peer.hear()
    if message is None and peer.silent:
        raise EOFError
    return message


def serve(
    peer: Peer, start: Mapping[str, Any], ranks: Sequence[int], folder: Path, check: Callable[[], None]
) -> None:
    """Run these ranks of the launch that `start` describes to their end, in a copy of its folder; send what they write.

    `check` raises if this machine's user wants no more. Raises `EOFError` if the launcher is gone. No rank is alive
    afterwards.
    """
    for name, content in start["files"].items():
        put_file(folder, {"name": name, "content": content})
    files = _Files(folder)
    command = [word.replace(f"{start['folder']}/", f"{folder}/") for word in start["command"]]
    agent = Ranks(World(**start["world"]), ranks, command, folder)
    try:
        looked = time.monotonic()
        while (code := agent.poll()) is None:
            check()
            if (message := hear(peer)) is not None and message[0] == "signal":
                agent.send_signal(int(message[1]["number"]))
            if time.monotonic() - looked > _FILES_SECONDS:
                files.send(peer, logs=bool(start["follow"]))
                looked = time.monotonic()
            time.sleep(POLL_SECONDS)
    finally:
        agent.end()
    files.send(peer, logs=True)
    peer.say("exit", code=code, failures=[asdict(one) for one in agent.failures])


class _Files:
    """The files in this machine's copy of the launch's folder, and the state in which each is at the launcher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent = {path: _state(path) for path in folder.iterdir()}

    def send(self, peer: Peer, *, logs: bool) -> None:
        """Send new files that the ranks wrote next to their job, and what their logs have grown by if requested."""
        for path in list(self._folder.rglob("*") if logs else self._folder.glob("*")):
            with contextlib.suppress(FileNotFoundError):  # a file that was renamed meanwhile
                if not path.is_file() or path.name.startswith("."):
                    continue
                size, _ = state = _state(path)
                before, self._sent[path] = self._sent.get(path, (0, 0)), state
                if state == before:
                    continue
                more = path.parent != self._folder
                with path.open("rb") as file:
                    if more:
                        file.seek(max(before[0], size - MOST_LOG_BYTES))
                    content = file.read(size - file.tell())
                peer.say(
                    "file", name=path.relative_to(self._folder).as_posix(), content=pack(content), more=more
                )


def _state(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns
