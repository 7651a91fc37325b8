"""`zerokit plan`: the table, JSON, the page, and what is said of what cannot be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.inside import zerokit_inside
from tests.planning.models import QWEN
from zerokit.placement import Mesh
from zerokit.planning.memory import context_bytes

GPT = ("plan", "gpt-tiny", "--seq-len", "64")
H100 = ("--device", "h100-80")


def test_the_table_says_what_to_choose_and_how(tmp_path: Path) -> None:
    done = zerokit_inside(tmp_path, *GPT, *H100, "--gpus", "12", "--batch-size", "2,4", "--page", "plan.html")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "gpt-tiny (35.7 K parameters), 12 ranks on 2 nodes, h100-80"
    heads = lines[1].split()
    assert heads[:3] == ["stage", "mesh", "batch"]
    assert {"GiB", "tok/s/dev", "MFU", "limit"} <= set(heads)
    assert any(re.fullmatch(r"Stage .* The former needs [12]\.\d of 80\.0 GiB\.", line) for line in lines)
    measure = next(line for line in lines if line.startswith("measure"))
    assert "zerokit bench --model gpt-tiny" in measure
    assert "--nodes 2 --nproc-per-node 6" in measure
    assert any(line.startswith("train    ZeroOptimizer(model, torch.optim.AdamW, stage=") for line in lines)
    assert "Assumed: 2 nodes of 6 devices. Use --nodes to change this." in lines
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_every_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    asked = (*GPT, *H100, "--gpus", "12", "--batch-size", "2,4", "--all")
    whole = zerokit_inside(tmp_path, *asked).stdout.splitlines()
    with monkeypatch.context() as patched:
        patched.setattr("rich.console.Console.is_terminal", True)
        shown = zerokit_inside(tmp_path, *asked, COLUMNS=str(width), TERM="xterm").stdout
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    table = shown.split("\n\n")[0].splitlines()[1:]
    rows = [line for line in table if not line.startswith("Not shown in")]
    assert max(map(len, rows)) <= width
    assert "…" not in shown
    told = next((line for line in table if line.startswith("Not shown in")), None)
    dropped = [] if told is None else told.partition(": ")[2].partition(";")[0].split(", ")
    assert (told is None) == (width == 200)
    known = {"stage", "mesh", "batch", "recompute", "GiB", "param", "grad", "optim", "bufs", "activ"}
    known |= {"step ms", "tok/s/dev", "MFU", "wait ms", "limit"}
    assert {head for head in known if head in rows[0]} == known - set(dropped)
    for row, full in zip(rows, whole[1:], strict=False):
        assert set(row.split()) <= set(full.split())


def test_json_is_one_document_and_a_cluster_file_gives_links(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        'device = "h100-80"\ngpus_per_node = 2\n[outer]\ngbit_per_s = 100\n'
    )
    done = zerokit_inside(
        tmp_path, *GPT, "--gpus", "4", "--cluster", "cluster.toml", "--mesh", "2x2", "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["format"] == "zerokit.plan/1"
    assert (answer["ranks"], answer["nodes"], answer["too_large"]) == (4, 2, [])
    assert {one["mesh"] for one in answer["fitting"]} == {"2x2"}
    best = answer["fitting"][0]
    assert best["step_ms"] == pytest.approx(
        best["compute_ms"] + best["optimizer_ms"] + sum(best["exposed_ms"].values()), rel=0.5
    )
    beside = context_bytes(Mesh(2, 2))
    assert sum(best["memory"]["peak_bytes"].values()) + beside == best["memory"]["needed_bytes"]


def test_a_page_that_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    done = zerokit_inside(tmp_path, *GPT, *H100, "--gpus", "8", "--batch-size", "2", "--page", "/dev/null/x")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("zerokit: the page cannot be written to /dev/null/x: ")


def test_a_configuration_of_hugging_face_and_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "small.toml").write_text(
        "gpus_per_node = 2\n[device]\ntflops = { bf16 = 1 }\nmemory_gb = 0.4\nmemory_gb_per_s = 1\n"
        "[inner]\ngb_per_s = 1\n"
    )
    done = zerokit_inside(tmp_path, "plan", "config.json", "--gpus", "2", "--cluster", "small.toml")
    assert done.returncode == 4, done.stderr
    assert "GiB more than there is" in done.stdout
    assert "Assumed: Trained as transformers' Qwen2ForCausalLM, with its own loss." in done.stdout
    assert "No times in bf16: nothing has been measured on device 'device'" in done.stdout


def test_modules_have_a_stage_of_their_own(tmp_path: Path) -> None:
    """In every row; bench has none, so only the arguments of ZeroOptimizer say how to train it."""
    asked = (*GPT, *H100, "--gpus", "8", "--nodes", "1", "--batch-size", "2", "--stage", "2")
    plain = zerokit_inside(tmp_path, *asked, "--json")
    own = zerokit_inside(tmp_path, *asked, "--module-stage", "blocks.0=3", "--json")
    assert (plain.returncode, own.returncode) == (0, 0), plain.stderr + own.stderr
    held = [json.loads(done.stdout)["fitting"][0]["memory"]["held_bytes"] for done in (plain, own)]
    assert held[1]["parameters"] < held[0]["parameters"]
    assert held[1]["optimizer"] == held[0]["optimizer"]
    table = zerokit_inside(
        tmp_path, *asked, "--module-stage", "blocks.0=3", "--module-stage", "norm=0"
    ).stdout
    assert 'stage={"blocks.0": 3, "norm": 0, "*": 2}' in table
    assert "\nmeasure" not in table
    for given, words in (
        ("block.0=3", "'block.0' is no module of the model, but 'blocks.0'"),
        ("blocks.0=4", "stage 4 is unknown"),
        ("blocks.0", "expected a module's path and its stage, such as backbone=3"),
    ):
        refused = zerokit_inside(tmp_path, *asked, "--module-stage", given)
        assert refused.returncode == 2
        assert words in refused.stderr


MIXED = ("--devices", "h100-80x4,a100-40x4")


def test_mixed_devices_get_shares_and_batches(tmp_path: Path) -> None:
    """The table, the settings to use, JSON and the page have them, and memory by kind."""
    asked = ("plan", "llama-1b", "--seq-len", "512", *MIXED, "--batch-size", "16", "--stage", "3")
    done = zerokit_inside(tmp_path, *asked, "--no-recompute", "--page", "plan.html")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" 8 ranks on 1 node, h100-80x4,a100-40x4")
    heads = [
        "stage",
        "batch",
        "batches",
        "shares",
        "recompute",
        "GiB",
        "h100-80",
        "GiB",
        "a100-40",
        "step",
        "ms",
    ]
    assert lines[1].split()[: len(heads)] == heads
    assert lines[1].split()[-1] == "equal"
    row = lines[2].split()
    fast, slow = map(int, row[2].split(":"))
    assert (row[1], fast + slow) == ("16", 32)
    assert fast > slow
    assert re.fullmatch(r"32:1\d|2:1", row[3])
    assert re.fullmatch(r"\d\.\d\dx", row[-1])
    assert any(line.startswith("With equal shares and batches it fits, and a step takes ") for line in lines)
    kinds = [line.split() for line in lines if line.startswith(("h100-80 ", "a100-40 "))]
    assert [one[:2] for one in kinds] == [["h100-80", "0–3"], ["a100-40", "4–7"]]
    train = next(line for line in lines if line.startswith("train"))
    assert re.search(r'stage=3, precision="bf16", shares=\((\d+), \1, \1, \1, (\d+), \2, \2, \2\)\)$', train)
    batches = next(line for line in lines if line.startswith("batches"))
    assert re.search(r"zerokit\.Batches\(lengths, samples=128, pace=\[.*, 1, 1, 1, 1\]\)$", batches)
    assert "Assumed: 1 node of 8 devices. Use --nodes to change this." in lines
    assert not any(line.startswith("measure") for line in lines)

    page = (tmp_path / "plan.html").read_text()
    for text in (
        "4 × h100-80 + 4 × a100-40",
        'id="kinds"',
        f"{fast}:{slow}",
        f"{slow} on a100-40",
        "shares=(",
    ):
        assert text in page

    answer = json.loads(zerokit_inside(tmp_path, *asked, "--no-recompute", "--json").stdout)
    assert [one["ranks"] for one in answer["kinds"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert answer["batches"] == batches.removeprefix("batches").strip()
    best = answer["fitting"][0]["mixed"]
    assert best["batches"] == [fast] * 4 + [slow] * 4
    assert len(best["shares"]) == 8
    assert [one["batch_size"] for one in best["kinds"]] == [fast, slow]
    for one in best["kinds"]:
        beside = context_bytes(Mesh(1, 8))
        assert sum(one["memory"]["peak_bytes"].values()) + beside == one["memory"]["needed_bytes"]
    assert best["equal"]["fits"]
    assert best["equal"]["times_as_long"] > 1


def test_devices_of_one_kind_are_planned_as_without_a_mixture(tmp_path: Path) -> None:
    asked = (*GPT, "--batch-size", "2", "--json")
    one = zerokit_inside(tmp_path, *asked, "--devices", "h100-80x8")
    other = zerokit_inside(tmp_path, *asked, *H100, "--gpus", "8")
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    assert one.stdout == other.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((*MIXED, "--gpus", "8"), "omit --gpus and --device"),
        ((*MIXED, *H100), "omit --gpus and --device"),
        ((*MIXED, "--nodes", "3"), "8 devices cannot be divided equally among 3 nodes"),
        ((*MIXED, "--nodes", "2", "--mesh", "2x4"), "shares lie along the inner axis"),
        (("--devices", "h100-80x4,b900x4"), "device 'b900' is unknown: choose one of"),
        (("--devices", "h100-80x0"), "expected a kind, x and how many ranks have one, at least 1"),
        (("--devices", "cpux4"), "cpu is no kind in a mixture"),
        (("--device", "h100-80"), "no ranks: give --gpus, or --devices"),
    ],
)
def test_what_is_no_mixture_is_wrong_use(tmp_path: Path, given: tuple[str, ...], words: str) -> None:
    refused = zerokit_inside(tmp_path, *GPT, *given, "--batch-size", "2")
    assert refused.returncode == 2
    assert words in " ".join(refused.stderr.split())
