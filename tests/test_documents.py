"""Documents that somebody else has written are refused in one short line that names the file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from zerokit import documents
from zerokit.bench.plans.subjects import _read_config
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.formats.torchfile import read_torch_file
from zerokit.cli import bench, cli
from zerokit.cluster.hosts import MOST_HOSTS, expand_hostlist, read_hostfile
from zerokit.cluster.membership import find_membership
from zerokit.documents import parse_json, parse_toml, read_text
from zerokit.errors import CheckpointError, UsageError
from zerokit.planning.cluster_files import read_cluster
from zerokit.text import MOST_LETTERS, printable, printable_json

_DEVICE = '[device]\nname = "x"\ntflops = { bf16 = 1 }\nmemory_gb_per_s = 1\n'
CLUSTERS = {
    "deep": "x = " + "[" * 5000 + "]" * 5000,
    "deep keys": "a." * 5000 + "b = 1",
    "deep JSON": '{"a":' * 5000,
    "1e308 GB": f"gpus_per_node = 8\n{_DEVICE}memory_gb = 1e308",
    "5,000 digits": "gpus_per_node = " + "9" * 5000,
    "4,000 digits": f"gpus_per_node = {'9' * 4000}\n{_DEVICE}memory_gb = 1",
    "4,000 digits of GB": f"gpus_per_node = 8\n{_DEVICE}memory_gb = {'9' * 4000}",
    "axes": '{"facts": {"group": {"axes": 5}}}',
    "ranks": '{"facts": {"group": {"axes": [{"axis": "inner", "ranks": 1e999}]}}}',
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("content", CLUSTERS.values(), ids=CLUSTERS.keys())
def test_cluster_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stage = " + "[" * 5000 + "]" * 5000, "is not a TOML file of options: values are nested too deep"),
        (
            "stage = " + "[" * 400 + "]" * 400,
            "is not a TOML file of options: values are nested more than 64 deep",
        ),
        ("steps = " + "9" * 5000, "is not a TOML file of options: Exceeds the limit"),
        ("stage = [[1]]", ": stage has a value of type list: expected texts or numbers"),
        ("steps = 2021-01-01", ": steps has a value of type date: expected texts or numbers"),
        (
            'engine = "\\u001b[31m\\u202e"',
            ": Invalid value for '--engine': '\\x1b[31m\\u202e' is not one of",
        ),
        (f'engine = "{"a" * 70_000}"', "more letters)"),
    ],
)
def test_sweep_files(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(content)
    with pytest.raises(click.UsageError) as caught:
        bench.command.main([str(path), "--no-mlflow"], standalone_mode=False)
    text = caught.value.format_message()
    assert text.startswith(str(path))
    assert said in text
    assert text.isprintable()
    assert len(text) < 3 * MOST_LETTERS


def test_what_click_says_of_a_variable_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKIT_BENCH_STEPS", "\x1b]0;title\x07" + "9" * 70_000)
    with pytest.raises(click.UsageError) as caught:
        cli.main(["bench"], standalone_mode=False)
    assert caught.value.format_message().isprintable()
    assert len(caught.value.format_message()) < 2 * MOST_LETTERS


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_documents_are_of_bounded_depth(parse: Callable[[str], object]) -> None:
    head = "" if parse is parse_json else "x = "
    assert parse(head + "[" * 60 + "]" * 60)
    for depth in (70, 5000):
        with pytest.raises(ValueError, match=r"^values are nested (too|more than 64) deep$"):
            parse(head + "[" * depth + "]" * depth)


def test_a_file_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_text(Path("/dev/zero"))


def test_model_configurations(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 5000)
    with pytest.raises(UsageError, match=f"{path} is not a model configuration: values are nested too deep"):
        _read_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "gpu[0-99999999999]",
        "[0-9]" * 6,
        f"[0-{MOST_HOSTS}]",
        "[" + "9" * 5000 + "]",
        "[٣-٤]",
        "a[0-60000],b[0-9999]",
    ],
)
def test_lists_of_nodes_have_an_end(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand_hostlist(text)
    assert len(str(caught.value)) < 300


def test_hostfiles_and_variables(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"a slots={'9' * 5000}\n")
    with pytest.raises(UsageError, match=f"line 1 of {path} is .*expected: HOST slots=N"):
        read_hostfile(path)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    for value in ("9" * 5000, "٣", "\x1b[31m"):
        with pytest.raises(UsageError, match="expected a number") as caught:
            find_membership(dict.fromkeys(names, value) | {"MASTER_ADDR": "a"})
        assert len(str(caught.value)) < 300


def test_a_failing_disk_under_a_zips_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zip library takes one for another format."""
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"x")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with opened(path) as fd:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(CheckpointError, match=rf"{path}: cannot be read: Input/output error"):
            read_torch_file(path, fd)


def test_terminal_text_is_escaped_and_ends() -> None:
    assert printable("a\x1b[31m\u202e\x9b\n") == "a\\x1b[31m\\u202e\\x9b\\n"
    assert printable("a" * 70_000) == "a" * MOST_LETTERS + " … (68,000 more letters)"
    text = json.dumps({"a": "\x9b\u202e\U000e0001 é\n"}, ensure_ascii=False, indent=1)
    assert json.loads(printable_json(text)) == json.loads(text)
    assert printable_json(text).replace("\n", "").isprintable()
