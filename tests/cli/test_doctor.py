"""`zerokit doctor` as a process: its exit codes, its two forms, and how little --quick takes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.cli.commands import start, wait_for, zerokit_imports
from tests.cli.inside import zerokit_inside
from zerokit.bench.record.schema import from_plain
from zerokit.doctor.facts import GroupFacts, RankFacts
from zerokit.doctor.findings import CHECKS, Severity


def test_a_fault_is_told_last_and_in_full(tmp_path: Path) -> None:
    """By a process that imports neither torch nor MLflow, and does not wait for a silent server."""
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://me:s3cret@127.0.0.1:{silent.getsockname()[1]}"
        words = ("doctor", "--quick", "file/run", "--tracking-uri", uri)
        done, imported = zerokit_imports(tmp_path, *words, COLUMNS="80", GLOO_SOCKET_IFNAME="warp9")
    assert done.returncode == 5
    assert "s3cret" not in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "tmp"]
    lines = done.stdout.rstrip().splitlines()
    assert not {"torch", "mlflow", "numpy"} & imported
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout  # no terminal, no colours
    faults = [place for place, line in enumerate(lines) if line.startswith("fault ")]
    quiet = [place for place, line in enumerate(lines) if line.startswith(("ok ", "skipped ", "warning "))]
    assert [lines[place].split()[1] for place in faults] == ["ZD301", "ZD601", "ZD801"]
    assert max(quiet) < min(faults)
    after = " ".join(" ".join(lines[faults[0] :]).split())
    assert "found GLOO_SOCKET_IFNAME=warp9: no such interface" in after
    assert "means The ranks' backend finds no interface and fails when it starts." in after
    assert "do name one that leads to the other nodes:" in after
    assert "no answer within" in after
    assert lines[-1].startswith("3 faults, ")


def test_json_is_one_document_with_facts_by_rank(tmp_path: Path) -> None:
    done = zerokit_inside(tmp_path, "doctor", "--json", "--nodes", "2", "--pairs")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == "zerokit.doctor/1"
    assert (document["quick"], document["nodes"], document["nproc_per_node"]) == (False, 2, 1)
    assert document["exit_code"] == 0
    assert sum(document["counts"].values()) == len(document["findings"])
    codes = [one["code"] for one in document["findings"]]
    assert codes == sorted(codes)
    for one in document["findings"]:
        assert set(one) == {"code", "severity", "check", "where", "found", "meaning", "remedy"}
        assert one["check"] == CHECKS[one["code"]].title
        assert Severity(one["severity"]) in Severity
    ranks = [from_plain(RankFacts, one) for one in document["facts"]["ranks"]]
    assert [one.seat.rank for one in ranks] == [0, 1]
    assert from_plain(GroupFacts, document["facts"]["group"]).pairs[0].gb_per_s > 0
    assert document["facts"]["tracking"]["kind"] == "SQLite"
    (rates,) = {
        one.directory.rates for one in ranks if one.directory.rates is not None and one.seat.rank == 0
    }
    assert min(rates.read_bytes_per_s, rates.write_bytes_per_s) > 0
    assert {"ZD605"} <= set(codes)
    assert "ZD204" not in codes  # there is no device
    # Nothing is left but the folder that the test gave for temporary files.
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


def test_a_signal_ends_it_and_its_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, ["doctor", "--nproc-per-node", "2"])
    wait_for(lambda: any((tmp_path / "tmp").glob("zerokit-doctor-*/stage-0")), process)
    process.terminate()
    assert process.wait(60) == 128 + 15
    assert "interrupted by SIGTERM" in process.communicate()[1]
    assert list((tmp_path / "tmp").glob("zerokit-doctor-*")) == []
