"""Rules that a reader of any file may rely on, checked on the syntax tree."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import astraflow

PICKLE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
PICKLE_CALLS = {("torch", "save"), ("torch", "load"), ("np", "load"), ("numpy", "load")}
BROAD = {"Exception", "BaseException"}


def _trees(repo: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted((repo / "src/astraflow").rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(repo), text, ast.parse(text)


def test_no_pickle_anywhere(repo: Path) -> None:
    """Neither on the wire nor on disk: bytes that are loaded must not be able to run code."""
    found = []
    for path, _, tree in _trees(repo):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{path}:{node.lineno}" for a in node.names if a.name.split(".")[0] in PICKLE_MODULES]
            elif isinstance(node, ast.ImportFrom):
                if (node.module or "").split(".")[0] in PICKLE_MODULES:
                    found.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in PICKLE_CALLS:
                    found.append(f"{path}:{node.lineno} {node.value.id}.{node.attr}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path}:{node.lineno} allow_pickle")
    assert not found


def test_broad_excepts_name_the_fault_that_they_tolerate(repo: Path) -> None:
    """``except Exception`` swallows; each needs the waiver and, in the same comment or above, words saying why."""
    found = []
    for path, text, tree in _trees(repo):
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises(node):
                line = lines[node.lineno - 1]
                above, below = lines[node.lineno - 2], lines[node.lineno] if node.lineno < len(lines) else ""
                comments = [line.partition("BLE001")[2], above.partition("#")[2], below.partition("#")[2]]
                waived = "noqa: BLE001" in line or _logs(node)
                if not waived or max(len(text.strip(" -:")) for text in comments) < 12:
                    found.append(f"{path}:{node.lineno} {line.strip()}")
    assert not found, "\n".join(found)


def _raises(handler: ast.ExceptHandler) -> bool:
    """The error goes on, in the same or in other words: nothing is swallowed."""
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _logs(handler: ast.ExceptHandler) -> bool:
    """With its traceback: the linter asks for no waiver then."""
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call)]
    return any(keyword.arg == "exc_info" for call in calls for keyword in call.keywords)


def _is_broad(node: ast.expr | None) -> bool:
    if node is None:
        return True
    if isinstance(node, ast.Tuple):
        return any(_is_broad(item) for item in node.elts)
    return isinstance(node, ast.Name) and node.id in BROAD


def test_nothing_is_left_to_do(repo: Path) -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X ")
    found = [f"{path}:{mark}" for path, text, _ in _trees(repo) for mark in marks if mark in text]
    assert not found


def test_tasks_are_kept_and_queues_are_bounded(repo: Path) -> None:
    """An unkept task may be collected while it runs, its error unseen; an unbounded queue hides back-pressure."""
    found = []
    for path, _, tree in _trees(repo):
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value.func
                if isinstance(call, ast.Attribute) and call.attr in ("create_task", "ensure_future"):
                    owner = ast.unparse(call.value)
                    if owner in ("asyncio", "loop", "asyncio.get_running_loop()"):
                        found.append(f"{path}:{node.lineno} task not kept")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.Queue", "queue.Queue"):
                bounded = node.args or any(k.arg == "maxsize" for k in node.keywords)
                if not bounded:
                    found.append(f"{path}:{node.lineno} unbounded queue")
    assert not found, "\n".join(found)


def test_only_shells_know_the_time(repo: Path) -> None:
    """Decisions take ``now``: the ledger and the algorithms run in simulated time because nothing there asks."""
    pure = ("src/astraflow/algorithms", "src/astraflow/types.py", "src/astraflow/losses")
    found = []
    for path, _, tree in _trees(repo):
        if not str(path).startswith(pure):
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if {"time", "datetime", "random", "socket", "threading"} & set(names):
                found.append(f"{path}:{node.lineno} {names}")
    assert not found


def test_dunder_all_names_what_exists() -> None:
    """Every module imports, and what it says that it offers is there."""
    missing = []
    for info in pkgutil.walk_packages(astraflow.__path__, "astraflow."):
        if info.name.rsplit(".", 1)[-1] == "__main__":
            continue
        module = importlib.import_module(info.name)
        missing += [f"{info.name}.{name}" for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not missing


def test_inheritance_only_from_record_protocol_exception(repo: Path) -> None:
    """Of our own classes, that is; a library that works by subclassing (torch.nn.Module) leaves no choice."""
    roots = {"Record", "Protocol"}
    ours: dict[str, set[str]] = {}
    for _, _, tree in _trees(repo):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                ours[node.name] = {ast.unparse(base).split("[")[0] for base in node.bases}
    errors = {"AstraFlowError", "Exception", "BaseException"}
    while grown := {name for name, bases in ours.items() if bases & errors} - errors:
        errors |= grown
    found = {name: bases & set(ours) - roots for name, bases in ours.items() if name not in errors}
    assert not {name: bases for name, bases in found.items() if bases}
