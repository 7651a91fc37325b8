"""`zerokit compare --github`: annotations as the runner reads them, and a summary without anybody else's markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt

from tests.bench.records import make_cell
from tests.cli.commands import zerokit_forked
from zerokit.bench.record.record import write_record
from zerokit.bench.record.status import Status
from zerokit.bench.report.github import Annotation
from zerokit.cli import cli

RULE = ("--fail-on", "step/p50_ms:3%")
EVIL = "\n::error::owned ##[add-mask]e %0A::warning:: <img src=x onerror=1> | `x` [a](http://b) @team www.evil.org"
COMMANDS = r"add-mask|debug|echo|endgroup|error|group|notice|save-state|set-output|stop-commands|warning"


def commands(output: str) -> list[tuple[str, dict[str, str], str]]:
    """The commands in a step's output, by the runner's rules: those that begin a line, and older ones anywhere."""
    found, token = [], None
    for line in re.split(r"\r\n|\r|\n", output):
        if token is not None:
            token = None if line.strip() == f"::{token}::" else token
        elif new := re.match(rf"\s*::({COMMANDS})(?: (.*?))?::(.*)", line):
            name, given, text = new.groups()
            pairs = dict(one.split("=", 1) for one in (given or "").split(",") if one)
            if name == "stop-commands":
                token = text
            else:
                decoded = {key: decode(value, ":,") for key, value in pairs.items()}
                found.append((name, decoded, decode(text, "")))
        elif old := re.search(rf"##\[({COMMANDS})", line):
            found.append((old[1], {}, line))
    assert token is None
    return found


def decode(text: str, more: str) -> str:
    for character in f"\r\n{more}%":
        text = text.replace(f"%{ord(character):02X}", character)
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, step_ms, host in (("before", 700.0, "a"), ("after", 790.0, "b"), ("evil", 790.0, EVIL)):
        for repeat in range(3):
            record = make_cell(step_ms=step_ms + repeat, repeat=repeat, twin=False)
            if name == "evil":
                record = replace(
                    record, status=Status.FAILED, reason=host, settings=replace(record.settings, model=host)
                )
            write_record(replace(record, id=f"{name}-{repeat}"), tmp_path / name / f"{repeat}.json")
    write_record(replace(make_cell(), id="one"), tmp_path / "one.json")
    write_record(replace(make_cell(step_ms=720.0), id="two"), tmp_path / "two.json")
    return tmp_path


def compare(folder: Path, *arguments: str) -> CompletedProcess[str]:
    summary = str(folder / "summary.md")
    return zerokit_forked(folder, "compare", *arguments, "--github", GITHUB_STEP_SUMMARY=summary)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def rendered(folder: Path) -> str:
    text = (folder / "summary.md").read_text(encoding="utf-8")
    return str(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


def test_annotations_say_what_is_worse_unknown_or_well(folder: Path) -> None:
    (folder / "summary.md").write_text("# of another step\n")
    worse = compare(folder, "before", "after", *RULE)
    assert worse.returncode == 3, worse.stderr
    ((level, given, text),) = commands(worse.stdout)
    assert (level, given) == ("error", {"title": "step/p50_ms"})
    assert "12.8% worse than" in text
    assert "allowed 3%" in text
    page = rendered(folder)
    assert page.startswith("<h1>of another step</h1>\n<h3>zerokit compare</h3>")
    assert page.count("<table>") == 1
    assert "❌" in page
    well = compare(folder, "after", "before", *RULE)
    assert (well.returncode, [one[0] for one in commands(well.stdout)]) == (0, ["notice"])
    unknown = compare(folder, "one.json", "two.json", *RULE, "--json")
    assert unknown.returncode == 4
    json.loads(unknown.stdout)
    assert commands(unknown.stdout) == []
    assert [one[0] for one in commands(unknown.stderr)] == ["warning"]
    plain = compare(folder, "before", "after")
    assert (plain.returncode, commands(plain.stdout)) == (0, [])
    assert rendered(folder).count("<table>") == 4


def test_errors_are_annotated_and_leave_as_ever(folder: Path) -> None:
    (folder / "bad.json").write_text("{")
    for code, arguments in (
        (2, ["no.json"]),
        (1, ["bad.json"]),
        (2, []),
        (2, ["one.json", "--baseline", "x%\n::error::y"]),
    ):
        failed = compare(folder, *arguments)
        assert failed.returncode == code
        ((level, given, _),) = commands(failed.stdout + failed.stderr)
        assert (level, given) == ("error", {"title": "zerokit compare"})
    (folder / "summary.md").mkdir()
    failed = compare(folder, "one.json")
    assert failed.returncode == 1
    assert "cannot be written" in commands(failed.stdout)[-1][2]
    worse = compare(folder, "before", "after", *RULE)
    assert worse.returncode == 3
    assert "cannot be written" in commands(worse.stdout)[-1][2]


def test_names_in_records_are_no_commands_and_no_markup(folder: Path) -> None:
    for more in ([], ["--json"]):
        done = compare(folder, "before", "evil", "one.json", *more)
        assert done.returncode == 0, done.stderr
        found = commands(done.stdout) + commands(done.stderr)
        assert {name for name, _, _ in found} <= {"warning"}
        assert not [text for _, _, text in found if text.startswith("owned") or "\n" in text]
    page, tags = rendered(folder), Tags()
    tags.feed(page)
    assert tags.seen <= {"h3", "ul", "li", "p", "table", "thead", "tbody", "tr", "th", "td"}
    rows = [row.count("<td") for row in page.split("<tr>") if "<td" in row]
    assert len(set(rows)) == 1
    assert "@team" not in page
    assert "::error::owned" in page  # as text


def test_commands_are_escaped() -> None:
    text = str(Annotation("error", "a:b,c%\n", "50%\r\n::error::x"))
    assert text == "::error title=a%3Ab%2Cc%25%0A::50%25%0D%0A::error::x"
    assert commands(text) == [("error", {"title": "a:b,c%\n"}, "50%\r\n::error::x")]


def test_without_a_summary_there_are_annotations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    done = CliRunner().invoke(
        cli, ["compare", str(folder / "before"), str(folder / "after"), "--github", *RULE]
    )
    assert done.exit_code == 3
    assert [one[0] for one in commands(done.stdout)] == ["error"]
    assert "GITHUB_STEP_SUMMARY is not set" in done.stderr


def test_a_summary_may_be_a_pipe(folder: Path) -> None:
    out = zerokit_forked(folder, "compare", "after", "--github", GITHUB_STEP_SUMMARY="/dev/stdout")
    assert out.returncode == 0
    assert "### zerokit compare\n" in out.stdout


def test_a_summary_has_at_most_a_mebibyte(folder: Path) -> None:
    (folder / "summary.md").write_bytes(b"x" * ((1 << 20) - 500))
    assert compare(folder, "before", "after", *RULE).returncode == 3
    assert (1 << 20) - 500 < (folder / "summary.md").stat().st_size <= 1 << 20


def test_the_example_is_a_workflow_with_few_rights_and_fixed_actions() -> None:
    path = Path(__file__).parents[2] / "examples" / "compare.yml"
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    uses = [step["uses"] for step in steps if "uses" in step]
    assert uses
    assert all(re.fullmatch(r"actions/[\w/-]+@[0-9a-f]{40}", one) for one in uses)
    assert any(one.startswith("actions/cache/restore@") for one in uses)
    assert not [step for step in steps if "${{ github.event" in step.get("run", "")]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    (gate,) = (line for line in lines if "--github" in line)
    assert gate.startswith("zerokit compare baseline ")
