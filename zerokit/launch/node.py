"""One node of a remote launch: it identifies itself, runs torchrun's agent, and sends its files back.

    python -m zerokit.launch.node        its messages are those of `frames`

It imports no torch itself, so that it answers at once. When its input closes it ends everything that it started.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from zerokit.launch import frames
from zerokit.launch.frames import MOST_LOG_BYTES, frame, pack, parse, put_file, read_lines, relocate
from zerokit.launch.local import threads_per_rank
from zerokit.launch.network import address_towards, free_port, interface_of
from zerokit.launch.processes import MARK, StoppedProcesses, kill_marked
from zerokit.versions import versions

_POLL_SECONDS = 0.05
_FILES_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class Launcher:
    """The launcher's end of the pipe: threads read and write its messages, so that no call blocks."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._unsent: queue.Queue[bytes] = queue.Queue()
        self._gone = False
        self._received: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        threading.Thread(target=self._read, args=(incoming,), daemon=True).start()
        threading.Thread(target=self._write, args=(outgoing,), daemon=True).start()

    def _read(self, incoming: BinaryIO) -> None:
        for line in read_lines(incoming, self._hear):
            if (message := parse(line)) is not None:
                self._received.put(message)
        self._received.put(None)

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def _write(self, outgoing: BinaryIO) -> None:
        while True:
            try:
                line = self._unsent.get(timeout=frames.HEARTBEAT_SECONDS)
            except queue.Empty:
                self.say("alive")
                continue
            try:
                outgoing.write(line)
                outgoing.flush()
            except OSError:
                self._gone = True
            self._unsent.task_done()

    def hear(self) -> tuple[str, dict[str, Any]] | None:
        """The next message, if any; raises `EOFError` if the launcher is gone."""
        try:
            message = self._received.get_nowait()
        except queue.Empty:
            if self._gone or time.monotonic() - self._heard > frames.SILENCE_SECONDS:
                raise EOFError from None
            return None
        if message is None:
            raise EOFError
        return message

    def say(self, kind: str, **content: Any) -> None:
        """Send a message without waiting."""
        self._unsent.put(frame(kind, **content))

    def finish(self) -> None:
        """Wait until all messages are written; raises `EOFError` if the launcher is gone."""
        while self._unsent.unfinished_tasks:
            self.hear()
            time.sleep(_POLL_SECONDS)


class Files:
    """The files in this node's copy of the launch's folder, and those that have been sent back."""

    def __init__(self, folder: Path, inputs: Mapping[str, str]) -> None:
        self._folder = folder
        self._sent: dict[Path, tuple[int, int]] = {}
        for name in inputs:
            self._is_new(folder / name)

    def _is_new(self, path: Path) -> bool:
        try:
            seen = path.stat()
        except FileNotFoundError:
            return False
        state = seen.st_mtime_ns, seen.st_size
        if self._sent.get(path) == state:
            return False
        self._sent[path] = state
        return True

    def send(self, launcher: Launcher, *, logs: bool) -> None:
        """Send new files that the ranks wrote next to their job, and new output in `logs` if requested."""
        paths = list(self._folder.rglob("*") if logs else self._folder.glob("*"))
        for path in paths:
            if path.is_file() and not path.name.startswith(".") and self._is_new(path):
                with contextlib.suppress(FileNotFoundError):  # a file that was renamed meanwhile
                    content = path.read_bytes()
                    content = content if path.parent == self._folder else content[-MOST_LOG_BYTES:]
                    name = path.relative_to(self._folder).as_posix()
                    launcher.say("file", name=name, content=pack(content))


def _variables(start: Mapping[str, Any], launch_id: str) -> dict[str, str]:
    variables = {**os.environ, **start["environment"], MARK: launch_id}
    variables.setdefault("OMP_NUM_THREADS", str(threads_per_rank(start["nproc_per_node"])))
    # gloo otherwise looks the host's own name up, which on many machines leads to loopback.
    with contextlib.suppress(OSError):
        interface = interface_of(address_towards(start["master_addr"]))
        if interface is not None:
            variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    return variables


def _start_agent(start: Mapping[str, Any], folder: Path, launch_id: str) -> subprocess.Popen[bytes]:
    directory = folder / f"node-{start['node']}"
    directory.mkdir()
    torchrun = (
        f"--nnodes {start['nodes']} --node-rank {start['node']} --nproc-per-node {start['nproc_per_node']} "
        f"--max-restarts 0 --rdzv-backend static --master-addr {start['master_addr']} "
        f"--master-port {start['master_port']} --redirects 3"
    ).split()
    agent = [sys.executable, "-m", "zerokit.launch.agent", str(directory / "report.json"), str(os.getpid())]
    rank = ["-m", "zerokit.launch.rank", start["module"]]
    rank += relocate(start["arguments"], start["folder"], folder)
    with (directory / "agent.log").open("wb") as log:
        return subprocess.Popen(
            [*agent, *torchrun, "--log-dir", str(directory), *rank],
            env=_variables(start, launch_id),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _serve(launcher: Launcher, start: Mapping[str, Any], folder: Path) -> tuple[int, str | None]:
    """Run the agent to its end; returns its exit code, negative for a signal, and why it was killed here, if it was."""
    launch_id = uuid.uuid4().hex
    for name, content in start["files"].items():
        put_file(folder, {"name": name, "content": content})
    files = Files(folder, start["files"])
    process = _start_agent(start, folder, launch_id)
    stopped = StoppedProcesses()
    try:
        looked = time.monotonic()
        while process.poll() is None:
            message = launcher.hear()
            stopped.look([process.pid])
            if message is not None and message[0] == "signal":
                process.send_signal(int(message[1]["number"]))
            if time.monotonic() - looked > _FILES_SECONDS:
                files.send(launcher, logs=bool(start["follow"]))
                looked = time.monotonic()
            if message is None:
                time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        kill_marked(launch_id, spare=frozenset([process.pid]))
        process.kill()
        process.wait()
        kill_marked(launch_id)
    files.send(launcher, logs=True)
    return process.returncode, stopped.explain(process.pid)


def main() -> int:
    """Serve one launch; returns 0 if it was served to its end, even if ranks failed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other prints must not get between the frames
    launcher = Launcher(sys.stdin.buffer, outgoing)
    folder = Path(tempfile.mkdtemp(prefix="zerokit-node-"))
    try:
        launcher.say(
            "hello", versions=versions(), host=socket.gethostname(), pid=os.getpid(), port=free_port("")
        )
        while (message := launcher.hear()) is None:
            time.sleep(_POLL_SECONDS)
        kind, start = message
        if kind != "start":
            return 2
        code, trouble = _serve(launcher, start, folder)
        launcher.say("exit", code=code, trouble=trouble)
        launcher.finish()
    except EOFError:
        return 1  # the launcher is gone
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # At once: the thread that reads may hold the lock of the standard input, which Python would wait for.
    os._exit(main())
