"""Databases of another schema than the installed MLflow's: refused before any write, and named by the doctor."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from zerokit.bench.tracking.schema import sqlite_path, wrong_schema
from zerokit.bench.tracking.store import Store, Tracking, TrackingError, connect
from zerokit.doctor.tracking import judge_tracking, look_at_tracking

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def own(place: Path) -> Path:
    connect("sqlite:///own.db")
    return place / "own.db"


def altered(own: Path, *statements: str) -> Path:
    shutil.copy(own, copy := own.with_name("altered.db"))
    with closing(sqlite3.connect(copy)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return copy


def downgraded(own: Path) -> Path:
    """A real older schema: MLflow's own migration taken back."""
    import sqlalchemy
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config

    shutil.copy(own, copy := own.with_name("altered.db"))
    config = _get_alembic_config(f"sqlite:///{copy}")  # type: ignore[no-untyped-call]  # MLflow's
    engine = sqlalchemy.create_engine(f"sqlite:///{copy}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "-1")
    engine.dispose()
    return copy


def refused(file: Path, *said: str) -> None:
    before = file.read_bytes()
    uri = f"sqlite:///{file}"
    with pytest.raises(TrackingError) as refusal:
        Store(Tracking(uri, "e"))
    (finding,) = [one for one in judge_tracking(look_at_tracking(uri, quick=False)) if one.code == "ZD803"]
    assert finding.severity.name == "FAULT"
    for words in said:
        assert words in str(refusal.value)
        assert words in f"{finding.found} {finding.remedy}"
    assert file.read_bytes() == before
    assert not [one for one in file.parent.iterdir() if one.name.startswith("altered.db-")]


def test_the_installed_clients_store_is_taken(own: Path) -> None:
    assert wrong_schema(f"sqlite:///{own}") is None
    assert wrong_schema("sqlite:///none.db") is None
    assert not Path("none.db").exists()


def test_an_older_schema_is_not_upgraded(own: Path) -> None:
    refused(
        downgraded(own),
        "the schema is older: found",
        "expects revision",
        "stop all writers",
        "mlflow db upgrade",
    )


def test_a_newer_schema_is_not_touched(own: Path) -> None:
    newer = altered(own, "UPDATE alembic_version SET version_num = 'ffffffffffff'")
    refused(
        newer, "newer, or not MLflow's: found revision ffffffffffff", "expects revision", "install the MLflow"
    )


def test_tables_without_a_revision_are_not_touched(own: Path) -> None:
    refused(altered(own, "DROP TABLE alembic_version"), "no revision", "name another database")
    moved = own.with_name("altered.db")
    with pytest.raises(TrackingError, match="no revision"):
        connect(f"sqlite:///file:{moved}?mode=rw&uri=true")
    empty = own.with_name("empty.db")
    empty.write_bytes(b"")
    assert wrong_schema(f"sqlite:///{empty}") is None


def test_the_file_of_a_store_is_the_one_that_sqlalchemy_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "100%41 sure").mkdir()
    monkeypatch.chdir(folder)
    connection = Store(Tracking(uri := "sqlite+pysqlite:///runs%20of.db", "e")).client
    assert connection.get_experiment_by_name("e") is not None
    assert [sqlite_path(uri)] == [Path(name) for name in os.listdir()]


@pytest.mark.parametrize("uri", ["sqlite:///:memory:", "sqlite://", "postgresql://h/d", "http://h", "runs"])
def test_other_stores_have_no_such_file(uri: str) -> None:
    assert sqlite_path(uri) is None


@pytest.mark.parametrize("uri", ["sqlite:runs.db", "sqlite://runs.db"])
def test_a_store_with_too_few_slashes_is_named(uri: str) -> None:
    with pytest.raises(TrackingError, match="with three or four slashes"):
        Store(Tracking(uri, "e"))
    (finding,) = judge_tracking(look_at_tracking(uri, quick=True))
    assert (finding.code, finding.severity.name) == ("ZD801", "FAULT")
    assert "with three or four slashes" in finding.found
