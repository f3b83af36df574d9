"""One digest over the sources that decide what an episode is: the recipe's and the workflow's own packages."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")


def code_digest(modules: Iterable[str]) -> str:
    """SHA-256 over (name, bytes) of every source file that belongs to one of these modules; installed code is named
    by AstraFlow's version alone."""
    files: dict[str, Path] = {}
    for name in sorted(set(modules)):
        files.update(_sources(name))
    digest = hashlib.sha256(importlib.metadata.version("astraflow").encode())
    for label, path in sorted(files.items()):
        digest.update(f"\0{label}\0".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def _sources(module_name: str) -> dict[str, Path]:
    module = sys.modules.get(module_name)
    source = getattr(module, "__file__", None)
    if source is None or module_name.partition(".")[0] == "astraflow" or _is_installed(Path(source)):
        return {}
    path = Path(source)
    if module_name.count(".") or path.name == "__init__.py":
        top = sys.modules[module_name.partition(".")[0]]
        folder = Path(top.__file__).parent if top.__file__ else path.parent
        return {f"{folder.name}/{p.relative_to(folder).as_posix()}": p for p in sorted(folder.rglob("*.py"))}
    found: dict[str, Path] = {}
    _with_siblings(path, found)
    return found


def _with_siblings(path: Path, found: dict[str, Path]) -> None:
    """A single-file recipe and the files beside it that it imports, read from the text so that every process agrees."""
    if path.name in found:
        return
    found[path.name] = path
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            sibling = path.parent / f"{name.partition('.')[0]}.py"
            if sibling.exists():
                _with_siblings(sibling, found)


def _is_installed(path: Path) -> bool:
    standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
    resolved = path.resolve()
    return any(part in INSTALLED for part in resolved.parts) or resolved.is_relative_to(standard)
