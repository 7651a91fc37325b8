"""The command `zerokit compare`: what it prints, and how it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.bench.records import make_cell, make_sweep
from tests.cli.commands import zerokit_imports
from tests.cli.inside import zerokit_inside
from zerokit.bench.record.record import write_record
from zerokit.cli import cli
from zerokit.errors import ZerokitError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, record in enumerate(make_sweep()):
        write_record(record, tmp_path / "sweep" / f"{place:03}.json")
    write_record(make_cell(step_ms=700.0, bucket_mb=25.0), tmp_path / "old.json")
    write_record(make_cell(step_ms=790.0, bucket_mb=50.0), tmp_path / "new.json")
    for name, step_ms in (("before", 700.0), ("after", 790.0)):
        for repeat in range(3):
            record = make_cell(step_ms=step_ms + repeat, bucket_mb=25.0, repeat=repeat, twin=False)
            write_record(replace(record, id=f"{name}-{repeat}"), tmp_path / name / f"{repeat}.json")
    return tmp_path


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_two_records_in_columns_and_what_differs(folder: Path) -> None:
    done = compare(folder / "old.json", folder / "new.json")
    assert done.exit_code == 0
    assert "bucket 25 MiB" in done.stdout.splitlines()[1]
    assert "what differs" not in done.stdout  # the labels say it
    only = compare(folder / "old.json", folder / "new.json", "--metric", "step/p99_ms", "--metric", "mfu")
    assert "step p99" in only.stdout
    assert "peak host" not in only.stdout
    assert "mfu: no cell has it" in only.stdout


def test_the_baseline_can_be_chosen(folder: Path) -> None:
    done = compare(folder / "old.json", folder / "new.json", "--baseline", folder / "new.json")
    assert "against zerokit 2 · bucket 50 MiB" in done.stdout
    within = compare(folder / "sweep", "--baseline", folder / "sweep" / "004.json")
    assert "against DDP" in within.stdout
    by_name = compare(folder / "sweep", "--baseline", "FSDP2 3", "--html", folder / "page.html")
    assert "against FSDP2 3" in by_name.stdout
    assert "against FSDP2 3" in (folder / "page.html").read_text(encoding="utf-8")
    (row,) = (line for line in by_name.stdout.splitlines() if line.startswith("FSDP2 3"))
    assert "%" not in row
    unknown = compare(folder / "sweep", "--baseline", "FSDP2 9")
    assert unknown.exit_code == 2
    assert "or name a cell: 'zerokit 0', " in " ".join(unknown.stderr.split())


def test_the_gate_and_json_with_values_errors_and_verdicts(folder: Path) -> None:
    rule = ("--fail-on", "step/p50_ms:3%")
    worse = compare(folder / "before", folder / "after", "--json", *rule)
    assert worse.exit_code == 3
    assert "worse than" in worse.stderr
    content = json.loads(worse.stdout)
    step = content["cells"][1]["metrics"]["step/p50_ms"]
    assert step["verdict"] == "worse"
    assert step["relative"] > step["noise"] > 0
    assert content["regressions"][0]["metric"] == "step/p50_ms"
    assert (content["not_known"], content["losses_differ"]) == ([], [])
    assert compare(folder / "after", folder / "before", *rule).exit_code == 0
    for pair in (("old", "new"), ("new", "old")):  # single runs
        unknown = compare(*(folder / f"{name}.json" for name in pair), "--json", *rule)
        assert unknown.exit_code == 4
        assert "bench both with --repeats 3" in unknown.stderr
        labels = [cell["label"] for cell in json.loads(unknown.stdout)["cells"]]
        assert sorted(labels) == ["zerokit 2 · bucket 25 MiB", "zerokit 2 · bucket 50 MiB"]


def test_losses_that_should_agree(folder: Path) -> None:
    losses: list[float | None] = [5.5, 5.0, 4.5]
    for engine, stage, factor in (("zerokit", 1, 1.0), ("zerokit", 3, 1.0), ("fsdp2", 3, 1.00001)):
        record = replace(make_cell(engine, stage), loss=[loss and loss * factor for loss in losses])
        write_record(record, folder / "losses" / f"{engine}-{stage}.json")
    assert compare(folder / "losses", "--losses-agree", "1e-4").exit_code == 0
    differ = compare(folder / "losses", "--losses-agree", "1e-6")
    assert differ.exit_code == 3
    assert "of step 1 differs from that of" in differ.stderr
    write_record(replace(make_cell("ddp", 0), loss=[5.5, None, 4.5]), folder / "losses" / "diverged.json")
    diverged = compare(folder / "losses", "--losses-agree", "1e-4")
    assert diverged.exit_code == 3
    assert "step 2 differs" in diverged.stderr


def test_a_page_is_written_or_its_error_told(folder: Path) -> None:
    page = folder / "page.html"
    done = compare(folder / "sweep", "--html", page)
    assert done.exit_code == 0, done.output
    assert f"report  {page}" in done.stderr
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = compare(folder / "old.json", "--html", folder / "old.json" / "page.html")
    assert isinstance(done.exception, ZerokitError)
    assert "cannot be written" in str(done.exception)


def test_a_process_imports_neither_torch_nor_mlflow_and_tells_what_is_no_record(folder: Path) -> None:
    done, imported = zerokit_imports(folder, "compare", "sweep")
    assert "FSDP2 3" in done.stdout
    assert not {"torch", "mlflow", "scipy.stats", "altair", "vl_convert"} & imported
    (folder / "bad.json").write_text("{")
    bad = zerokit_inside(folder, "compare", "bad.json")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "bad.json: not a bench record" in bad.stderr
