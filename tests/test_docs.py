"""README and documentation: lengths, links, blocks of code, and no paragraph in two places."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import chain
from pathlib import Path

import click
import pytest
import yaml

from tests.cli.commands import FORKS, Torchrun, torchrun, zerokit_forked
from zerokit.cli import cli
from zerokit.network import free_port

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]


def blocks(path: Path, language: str) -> list[str]:
    """The blocks of code in `path` that are marked as `language`."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def anchors(path: Path) -> set[str]:
    """What links can point to inside `path`."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    # mkdocs.yml is read whole by mkdocs itself, which the linters call.
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = chain.from_iterable(
        [entry] if isinstance(entry, str) else next(iter(entry.values())) for entry in navigation
    )
    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def zerokit_lines(page: Path) -> list[list[str]]:
    """The words after `zerokit` in each line of the page's shell blocks that has it."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    split = [shlex.split(re.split(r" [|>] ", line)[0], comments=True) for line in lines]
    pairs = [(words, at) for words in split for at, word in enumerate(words[:-1]) if word == "zerokit"]
    return [words[at + 1 :] for words, at in pairs if words[at + 1].isalpha() and words[at + 1] != "zerokit"]


@pytest.mark.parametrize("page", [*TEXTS, ROOT / "docker" / "README.md"], ids=lambda path: path.stem)
def test_commands_have_the_options_that_exist(page: Path) -> None:
    group = click.Context(cli)
    for name, *words in zerokit_lines(page):
        command = cli.get_command(group, name)
        assert command is not None, f"{page.name}: zerokit {name}"
        context = click.Context(command, info_name=name)
        given, left, _ = command.make_parser(context).parse_args(list(words))
        assert not left, f"{page.name}: zerokit {name} {shlex.join(words)}"
        for parameter in command.params:
            value = given.get(parameter.name)
            assert not parameter.required or value, f"zerokit {name} {shlex.join(words)}: {parameter.name}"
            if value is not None and not isinstance(parameter.type, click.Path):
                parameter.type_cast_value(context, value)


def test_the_commands_of_checkpoints_run_as_printed(tmp_path: Path) -> None:
    (block,) = (one for one in blocks(ROOT / "docs" / "checkpoints.md", "sh") if "zerokit prune" in one)
    small = "MODEL=gpt-tiny SEQ_LEN=16 BATCH_SIZE=1 DEVICE=cpu TWIN=0 NO_MLFLOW=1 WARMUP=0"
    options = dict(f"ZEROKIT_BENCH_{setting}".split("=") for setting in small.split())
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "zerokit"
        done = zerokit_forked(tmp_path, *words, OMP_NUM_THREADS="1", **options)
        assert done.returncode == 0, done.stderr
    assert {"model", "run", "run-3"} <= {one.name for one in tmp_path.iterdir()}
    assert (tmp_path / "run" / "latest").read_text().startswith("step-00000025")


def test_no_paragraph_stands_twice() -> None:
    seen: dict[str, Path] = {}
    for page in TEXTS:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in re.split(r"\n\s*\n", prose):
            words = " ".join(paragraph.split())
            if len(words) > 80 and not words.startswith("|"):
                assert seen.setdefault(words, page) == page, f"{page.name} and {seen[words].name}: {words}"


def torchruns(page: Path) -> list[str]:
    """The page's lines that start `train.py` by torchrun."""
    lines = "".join(blocks(page, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if re.match(r"torchrun .*train\.py", line)]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A folder with README's program, of fewer steps, as `train.py`."""
    (program,) = (block for block in blocks(README, "python") if "init_process_group" in block)
    (tmp_path / "train.py").write_text(program.replace("range(100)", "range(20)"))
    return tmp_path


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "clusters.md"], ids=lambda page: page.stem)
def test_the_twenty_lines_train_as_printed(page: Path, train: Path) -> None:
    one, two = torchruns(page)
    words = re.sub(r"--nproc-per-node \d", "--standalone --nproc-per-node 2", one).split()[1:]
    run = torchrun(train, *FORKS, *words, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"rank (\d) on cpu: loss \d\.\d+", run.stdout)) == ["0", "1"]
    port = str(free_port())
    for old, new in (
        ("-node 8", "-node 1"),
        ("node-0", "127.0.0.1"),
        ("train.py", f"--master-port {port} train.py"),
    ):
        assert old in two
        two = two.replace(old, new)
    nodes = [
        Torchrun(train, [*FORKS, *two.replace("R ", f"{rank} ").split()[1:]], OMP_NUM_THREADS="1")
        for rank in (0, 1)
    ]
    with nodes[0], nodes[1]:
        said = [node.communicate(800) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
    for rank, (out, _) in enumerate(said):
        assert re.search(rf"rank {rank} on cpu: loss \d\.\d+", out)
