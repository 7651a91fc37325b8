"""Conversions that were killed: going on gives the bytes of one that was not. (test_crashes kills them anywhere.)"""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.cli.commands import run_python
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import example_content, example_layout, flip, write_checkpoint, write_run
from tests.support.crashes import Observed, killed_at, read_tree
from zerokit import files
from zerokit.checkpoint.staging import ORDER_NAME, Staging, leftovers
from zerokit.errors import CheckpointError, ZerokitWarning
from zerokit.process import Process

Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a step of three ranks, with a model's folder beside it."""
    folder = tmp_path_factory.mktemp("source")
    write_run(folder / "run", example_layout(3), example_content(example_layout(1)))
    (folder / "model" / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "additional_chat_templates/tool.jinja"):
        (folder / "model" / name).write_text(name)
    return folder / "run"


def reshard(source: Path, output: Path, **more: object) -> Path:
    return zerokit.reshard(source, 5, output, jobs=1, **more)  # type: ignore[arg-type]


def consolidate(source: Path, output: Path, **more: object) -> Path:
    return zerokit.consolidate(
        source,
        output,
        max_shard_size=6000,
        like=source.parent / "model",
        jobs=1,
        **more,  # type: ignore[arg-type]
    )


def interrupt(convert: Convert, source: Path, output: Path, *, at: int = 25) -> Path:
    """Kill a conversion at a change to the disk; returns what it leaves."""
    output.parent.mkdir(exist_ok=True)
    assert killed_at(at, partial(convert, source, output))
    (left,) = (left for left in leftovers(output.parent) if left.gone)
    return left.path


class Written(Observed):
    """Counts the bytes that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.size += sum(buffer.nbytes for buffer in buffers)
        return super().write(fd, buffers, offset)


def test_without_resume_it_is_named_and_goes_with_the_next_success(tmp_path: Path, run: Path) -> None:
    out = tmp_path / "d" / "out"
    left = interrupt(reshard, run, out)
    message = (
        f"{left}: an interrupted conversion to out, {files.measured(left)[0]:,} bytes: --resume (resume=True) "
        f"continues it, zerokit prune {out.parent} removes it"
    )

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.warns(ZerokitWarning) as told, pytest.raises(KeyboardInterrupt):
        reshard(run, out, progress=stop)
    assert [str(one.message) for one in told] == [message]
    with Staging(out.with_name("other")) as staging:  # nor does other work beside it remove it
        staging.commit()
    assert sorted(path.name for path in out.parent.iterdir()) == [left.name, "other"]
    with pytest.warns(ZerokitWarning):
        reshard(run, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["other", "out"]
    left = interrupt(reshard, run, tmp_path / "e" / "out")
    assert [doomed.path for doomed in zerokit.prune(tmp_path / "e").removed] == [left]


def _newer(run: Path, out: Path) -> None:
    """The run has a newer step meanwhile, say."""
    content = example_content(example_layout(1), step=101, seed=1)
    write_checkpoint(run / "step-00000101", example_layout(3), content)
    (run / "latest").unlink(missing_ok=True)
    reshard(run, out, resume=True)


OTHERS: dict[str, Callable[..., object]] = {
    r"request \(world 5, not 4\)": lambda run, out: zerokit.reshard(run, 4, out, resume=True),
    r"request \(of a run True, not False\)": lambda run, out: zerokit.reshard(
        run / "step-00000100", 5, out, resume=True
    ),
    r"request \(format zerokit, not huggingface\)": partial(zerokit.consolidate, dtype="bf16", resume=True),
    r"source \(its manifest is": _newer,
}


@pytest.mark.filterwarnings("ignore::zerokit.errors.ZerokitWarning")  # of the run without `latest`
@pytest.mark.parametrize("message", OTHERS)
def test_another_request_or_source_begins_anew(tmp_path: Path, run: Path, message: str) -> None:
    copy, out, changed = tmp_path / "run", tmp_path / "d" / "out", OTHERS[message]
    shutil.copytree(run, copy)
    interrupt(reshard, copy, out)
    not_taken = f"of another {message}.*, so that it is not taken over: zerokit prune"
    with pytest.warns(ZerokitWarning, match=not_taken):
        changed(copy, out)
    if changed is not _newer:
        changed(copy, tmp_path / "wanted")
        assert read_tree(out) == read_tree(tmp_path / "wanted")
    assert changed is not _newer or zerokit.Checkpoint(out).step == 101
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_target_of_the_same_first_letters_is_another(tmp_path: Path, run: Path) -> None:
    """Temporary names keep only so many of them."""
    one, other = (tmp_path / "d" / ("x" * 70 + end) for end in "ab")
    left = interrupt(reshard, run, one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reshard(run, other, resume=True)
    assert left.exists()
    reshard(run, one, resume=True)
    assert sorted(path.name for path in one.parent.iterdir()) == [one.name, other.name]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_writer_that_may_live_keeps_its_work(tmp_path: Path, run: Path, elsewhere: bool) -> None:
    out = tmp_path / "d" / "out"
    left = interrupt(reshard, run, out)
    writer = Process.current()
    if elsewhere:
        writer = replace(writer, host="node-9", boot="00000000")
    left = left.rename(left.with_name(f".out.tmp-{writer}.abcdef"))
    before = read_tree(left)
    told = "on node-9, which cannot be checked from here" if elsewhere else "is writing it"
    with pytest.warns(ZerokitWarning, match=f"{told}: it is not used, and this conversion starts over"):
        reshard(run, out, resume=True)
    assert read_tree(left) == before
    assert zerokit.verify(out).intact


@pytest.mark.filterwarnings(
    "ignore::zerokit.errors.ZerokitWarning"
)  # of an order that is another one by the damage
@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize("convert", [reshard, consolidate])
def test_damaged_work_gives_the_right_bytes(
    tmp_path_factory: pytest.TempPathFactory, run: Path, convert: Convert, data: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp() / f"damaged-{convert.__name__}"
    if not base.exists():
        base.mkdir()
        convert(run, base / "wanted")
        interrupt(convert, run, base / "d" / "out", at=60 if convert is reshard else 45)
    (left,) = (base / "d").iterdir()
    folder = tmp_path_factory.mktemp("again")
    work = Path(shutil.copytree(left, folder / left.name))
    found = sorted(path for path in work.rglob("*") if path.is_file() and path.stat().st_size)
    path = data.draw(st.sampled_from(found))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["whole", "flipped", "cut", "longer", "gone", "a link"]))
    if kind == "flipped":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[place:]
    elif kind == "longer":
        content += b"more"
    path.write_bytes(content)
    if kind in ("gone", "a link"):
        path.unlink()
    if kind == "a link":
        path.symlink_to(run.parent / "model" / "config.json")
    with files.replaced(disk := Written()):
        if kind == "a link" and path.name != ORDER_NAME:
            with pytest.raises(CheckpointError, match="symbolic"):
                convert(run, folder / "out", resume=True)
        else:
            convert(run, folder / "out", resume=True)
            assert read_tree(folder / "out") == read_tree(base / "wanted")
            assert "out" in [entry.name for entry in folder.iterdir()]
        if kind == "whole":  # what was there is not written again
            assert disk.size < sum(len(content or b"") for content in read_tree(base / "wanted").values())
    assert (run.parent / "model" / "config.json").read_text() == "config.json"
    shutil.rmtree(folder)


def test_a_source_that_is_damaged_meanwhile(tmp_path: Path, run: Path) -> None:
    """Nothing that an interrupted conversion has written is taken for right."""
    copy, out = tmp_path / "run", tmp_path / "d" / "out"
    shutil.copytree(run, copy)
    interrupt(reshard, copy, out, at=60)
    path = copy / "step-00000100" / "rank-00000-of-00003.safetensors"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00003\.safetensors: .*damaged"):
        reshard(copy, out, resume=True)
    assert list(out.parent.iterdir()) == []


def test_the_command_goes_on(tmp_path: Path, run: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    out = tmp_path / "run.to-5"
    left = interrupt(lambda _, o: reshard(tmp_path / "run", o), run, tmp_path / "d" / out.name)
    shutil.move(left, tmp_path)
    warned = command(tmp_path, "reshard", "run", "--to", "5", "-o", "nowhere/out")
    assert warned.returncode == 1
    done = command(tmp_path, "reshard", "run", "--to", "5", "--resume")
    assert (done.returncode, done.stdout) == (0, f"{out}\n")
    assert "verified and synced" in done.stderr
    assert [path.name for path in tmp_path.glob(".*")] == []
    assert read_tree(out) == read_tree(reshard(run, tmp_path / "wanted").parent)


@pytest.mark.parametrize(("number", "resumed"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_removes_the_work_but_not_what_was_taken_over(
    tmp_path: Path, run: Path, number: signal.Signals, resumed: bool
) -> None:
    shutil.copytree(run, tmp_path / "run")
    out = tmp_path / "d" / "out"
    out.parent.mkdir()
    kept = [interrupt(reshard, tmp_path / "run", out)] if resumed else []
    code = (
        "import os, signal; from tests.support.crashes import Counting\n"
        "from zerokit import files; from zerokit.cli import main\n"
        f"class Signalled(Counting):\n  def instead(self): os.kill(os.getpid(), {number:d})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "with files.replaced(Signalled(25)): main()"
    )
    arguments = ["reshard", "run", "--to", "5", "-o", "d/out", *(["--resume"] if resumed else [])]
    done = run_python(tmp_path, "-c", code, *arguments)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"zerokit: interrupted by {number.name}\n"
    assert list(out.parent.iterdir()) == kept
    assert all((left / ORDER_NAME).is_file() for left in kept)
