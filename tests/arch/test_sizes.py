"""Small files and short functions: what separates code that people like to read."""

from __future__ import annotations

import ast
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _sources(repo: Path) -> list[Path]:
    return sorted(p for folder in ("src/astraflow", "examples", "benchmarks") for p in (repo / folder).rglob("*.py"))


def test_files_stay_below_400_lines(repo: Path) -> None:
    sizes = {str(p.relative_to(repo)): len(p.read_text().splitlines()) for p in _sources(repo)}
    long = {name: lines for name, lines in sizes.items() if lines >= MAX_FILE_LINES}
    assert not long


def test_functions_stay_below_60_lines(repo: Path) -> None:
    long = []
    for path in _sources(repo):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(repo)}:{node.lineno} {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_front_documents_stay_short(repo: Path) -> None:
    for name, most in (("README.md", 200), ("ARCHITECTURE.md", 300)):
        path = repo / name
        assert path.exists(), f"{name} is missing"
        assert len(path.read_text().splitlines()) <= most


def test_quickstart_stays_a_page(repo: Path) -> None:
    code = [line for line in (repo / "examples/quickstart.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 30
