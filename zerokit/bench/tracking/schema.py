"""The schema of a MLflow database beside the one that the installed MLflow writes, read without importing MLflow.

MLflow's client upgrades an older database in passing, while other writers still use it, or fails in the middle of a
run. So the revision is compared before the client opens a store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sqlite3
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from zerokit.text import without_secrets

_REVISION = re.compile(r"^revision\b[^=\n]*=\s*(.+)$", re.MULTILINE)
_BEFORE = re.compile(r"^down_revision\b[^=\n]*=\s*(\([^)]*\)|.+)$", re.MULTILINE)
_QUOTED = re.compile(r"""["'](\w+)["']""")
_TABLE = "alembic_version"
_SECONDS = 1.0


def is_database(uri: str) -> bool:
    """Whether MLflow keeps such a store with SQLAlchemy, and so with a schema."""
    return re.match(r"(sqlite|postgres(ql)?|mysql|mssql)(\+\w+)?:", uri) is not None


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite store; None for a store in memory, and for other stores.

    Only SQLAlchemy knows: from 2.1 on %20 is a space in it, earlier not. Raises `ValueError` for a URI that it refuses.
    """
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(uri)
    except ArgumentError:
        url = None
    if url is None or url.host:
        raise ValueError(
            "a SQLite store is sqlite:///relative or sqlite:////absolute, with three or four slashes"
        )
    name = url.database or ":memory:"
    if url.query.get("uri") == "true":
        name = name.removeprefix("file:")
    return None if name == ":memory:" else Path(name)


@cache
def _known() -> tuple[frozenset[str], frozenset[str]]:
    """All revisions that the installed MLflow knows, and the last of them; empty without MLflow or its migrations."""
    package = importlib.util.find_spec("mlflow")
    folders = list(package.submodule_search_locations or ()) if package else []
    every, before = set[str](), set[str]()
    for folder in folders:
        for file in Path(folder, "store", "db_migrations", "versions").glob("*.py"):
            text = file.read_text(encoding="utf-8")
            for pattern, into in ((_REVISION, every), (_BEFORE, before)):
                for value in pattern.findall(text):
                    into.update(_QUOTED.findall(value))
    return frozenset(every), frozenset(every - before)


def wrong_schema(uri: str) -> tuple[str, str] | None:
    """What is wrong with the schema of this database, and what to do; None where nothing is, or nothing is there yet.

    Nothing is written. Raises `sqlite3.Error` or `ValueError`, and for other databases `ImportError` or what SQLAlchemy
    raises, if the database cannot be read.
    """
    known, heads = _known()
    if not heads or (found := _revisions(uri)) is None or found == heads:
        return None
    ours = f"MLflow {version('mlflow')} expects {_listed(heads)}"
    upgrade = (
        "stop all writers (servers, benches and trainings), take a backup, then run: mlflow db upgrade "
        f"'{without_secrets(uri)}'"
    )
    if not found:
        return (
            f"the database has tables and no revision of MLflow's schema, and {ours}",
            "name another database: this one is another program's, or its making was cut off",
        )
    if found <= known:
        return f"the schema is older: found {_listed(found)}, and {ours}", (
            f"{upgrade}; or use the older MLflow that made it"
        )
    return f"the schema is newer, or not MLflow's: found {_listed(found)}, and {ours}", (
        "install the MLflow that the store's other writers have, or use another store: a schema does not go back"
    )


def _listed(revisions: Iterable[str]) -> str:
    return "revision " + ", ".join(sorted(revisions))


def _revisions(uri: str) -> frozenset[str] | None:
    """The revisions in the database, none if it has tables without any; None if it has no tables at all."""
    if uri.startswith("sqlite"):
        if (path := sqlite_path(uri)) is None or not path.is_file():
            return None
        with contextlib.closing(sqlite3.connect(path, timeout=_SECONDS)) as database:
            names = {
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            rows = database.execute(f"SELECT version_num FROM {_TABLE}").fetchall() if _TABLE in names else []
    else:
        import sqlalchemy

        engine = sqlalchemy.create_engine(uri)
        try:
            with engine.connect() as connection:
                names = set(sqlalchemy.inspect(connection).get_table_names())
                query = sqlalchemy.text(f"SELECT version_num FROM {_TABLE}")
                rows = [tuple(row) for row in connection.execute(query)] if _TABLE in names else []
        finally:
            engine.dispose()
    return frozenset(str(row[0]) for row in rows) if names else None
