"""Docs reflect the code as it is: links lead somewhere, code parses, names exist, figures are filled in."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PATH = re.compile(
    r"`((?:src|tests|docs|examples|benchmarks|dataflow|rollout|trainer|weights|wire|run|testing)/[\w./]+)`"
)
DOTTED = re.compile(r"`(astraflow(?:\.\w+)+)(?::(\w+))?`")
REQUIRED = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/failures.md",
    "docs/glossary.md",
    "docs/recipes.md",
    "docs/benchmarks.md",
    "docs/results.md",
)


def _documents(repo: Path) -> list[Path]:
    return sorted([*repo.glob("*.md"), *(repo / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", REQUIRED)
def test_every_document_is_there(repo: Path, name: str) -> None:
    assert (repo / name).exists(), f"{name} is missing"


def test_links_lead_somewhere(repo: Path) -> None:
    dead = []
    for document in _documents(repo):
        for target in LINK.findall(document.read_text()):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            if not path.exists():
                dead.append(f"{document.relative_to(repo)} -> {target}")
            elif anchor and anchor not in _anchors(path):
                dead.append(f"{document.relative_to(repo)} -> {target} (no such heading)")
    assert not dead, "\n".join(dead)


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_are_named_exist(repo: Path) -> None:
    missing = []
    for document in _documents(repo):
        for name in PATH.findall(document.read_text()):
            places = (repo / name, repo / "src/astraflow" / name)
            if not any(place.exists() for place in places):
                missing.append(f"{document.relative_to(repo)}: {name}")
    assert not missing, "\n".join(missing)


def test_names_that_are_given_exist(repo: Path) -> None:
    missing = []
    for document in _documents(repo):
        for module, attribute in DOTTED.findall(document.read_text()):
            if not _exists(module, attribute):
                missing.append(f"{document.relative_to(repo)}: {module}{':' + attribute if attribute else ''}")
    assert not missing, "\n".join(missing)


def _exists(dotted: str, attribute: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in [*parts[cut:], *([attribute] if attribute else [])]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_python_blocks_parse_and_their_imports_work(repo: Path) -> None:
    broken = []
    for document in _documents(repo):
        for language, code in FENCE.findall(document.read_text()):
            if language != "python":
                continue
            where = f"{document.relative_to(repo)}: {code.strip().splitlines()[0]}"
            try:
                tree = ast.parse(code)
            except SyntaxError as error:
                broken.append(f"{where}: {error}")
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("astraflow"):
                    module = str(node.module)
                    broken += [f"{where}: {module}.{a.name}" for a in node.names if not _exists(module, a.name)]
    assert not broken, "\n".join(broken)


def test_make_targets_that_are_named_exist(repo: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (repo / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for document in _documents(repo):
        named |= set(re.findall(r"`make ([\w-]+)", document.read_text()))
        for language, code in FENCE.findall(document.read_text()):
            if language in ("", "bash", "console"):
                named |= set(re.findall(r"^\$? ?make ([\w-]+)", code, re.MULTILINE))
    assert not named - targets


def test_make_targets_stay_three_lines(repo: Path) -> None:
    lines = 0
    for line in (repo / "Makefile").read_text().splitlines():
        lines = lines + 1 if line.startswith("\t") else 0
        assert lines <= 3, line


def test_readme_shows_the_quickstart_as_it_is(repo: Path) -> None:
    assert (repo / "examples/quickstart.py").read_text().strip() in (repo / "README.md").read_text()


def test_every_setting_is_documented(repo: Path) -> None:
    """docs/recipes.md has a row for each field of the classes that it has a section for, and no other."""
    text = (repo / "docs/recipes.md").read_text()
    wrong = []
    for name, path, body in re.findall(r"^### (\w+)\n\n.*?\(`([\w/]+\.py)`\)\n\n(.*?)(?=^### |\Z)", text, re.M | re.S):
        tree = ast.parse((repo / "src/astraflow" / path).read_text())
        node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
        fields = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        documented = set(re.findall(r"^\| `(\w+)` \|", body, re.M))
        wrong += [f"{name}.{field}" for field in fields ^ documented]
    assert not wrong, f"in docs/recipes.md or in the code, but not in both: {sorted(wrong)}"
