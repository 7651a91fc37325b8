"""The structure of the code: no circles of imports, and objects that write their own fields alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIELDS_AT_MOST = 72
"""Fields that methods of the runtime change after construction: the state that a reader must keep in mind."""


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def test_no_two_files_import_each_other() -> None:
    """Imports for annotations and inside functions count; that of a package's own parts by its `__init__` does not."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.glob("zerokit/**/*.py")
    }
    graph = {}
    for name, path in files.items():
        packages = {".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)}
        graph[name] = set(_imports(ast.parse(path.read_text()))) & files.keys() - packages - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"imports go in a circle: {' <- '.join(error.args[1])}") from None


def _private_of_torch(tree: ast.AST) -> Iterator[str]:
    """Names of torch that begin with an underscore, but for `torch._foreach_…`, which it documents."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            names = [name] if name.replace(".", "").isidentifier() else []
        for name in names:
            first, *rest = name.split(".")
            if first in ("torch", "nn", "dist") and any(
                part.startswith("_") and not part.startswith(("_foreach_", "__")) for part in rest
            ):
                yield name


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.glob("zerokit/runtime/**/*.py")
        if path.name != "torch_internals.py"
        for name in _private_of_torch(ast.parse(path.read_text()))
    ]
    assert not found


def _changes(path: Path) -> Iterator[tuple[ast.ClassDef, ast.Attribute]]:
    """The attributes that methods assign, construction aside."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    for owner in classes:
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name in (
                "__init__",
                "__new__",
                "__post_init__",
            ):
                continue
            for node in ast.walk(method):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
                    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(each, ast.Attribute):
                            yield owner, each


def test_an_object_of_the_runtime_writes_its_own_fields() -> None:
    own, foreign = set(), []
    for path in ROOT.glob("zerokit/runtime/**/*.py"):
        for owner, each in _changes(path):
            if isinstance(each.value, ast.Name) and each.value.id in ("self", "cls"):
                own.add((owner.name, each.attr))
            else:
                foreign.append(f"{path.relative_to(ROOT)}:{each.lineno} {ast.unparse(each)}")
    print(f"{len(own)} fields change: {', '.join(sorted('.'.join(field) for field in own))}")
    assert not foreign
    assert len(own) <= FIELDS_AT_MOST
