"""The shape of the imports: arrows point down, and the data side runs on a machine without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCH_FREE = ("dataflow", "algorithms", "wire", "observe", "tasks", "types", "errors", "clock", "loss_options")


def test_import_contracts_hold(repo: Path) -> None:
    """Runs the contracts of .importlinter: layers, no torch on the data side, no pickle."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_folder_is_in_the_layers(repo: Path) -> None:
    """A new top-level folder must take a place in the contract: there is no room beside it."""
    named = (repo / ".importlinter").read_text()
    folders = {p.name for p in (repo / "src/astraflow").iterdir() if (p / "__init__.py").exists()}
    missing = {name for name in folders if f" {name}" not in named}
    assert not missing, f"not in .importlinter: {sorted(missing)}"


@pytest.mark.parametrize("banned", ["utils", "util", "common", "core", "helpers", "misc", "manager"])
def test_no_drawer_for_everything(repo: Path, banned: str) -> None:
    found = [p for p in (repo / "src").rglob("*") if p.stem == banned]
    assert not found


def _modules(repo: Path, part: str) -> list[str]:
    root = repo / "src" / "astraflow"
    files = [root / f"{part}.py"] if (root / f"{part}.py").exists() else sorted((root / part).rglob("*.py"))
    dotted = [".".join(f.relative_to(root.parent).with_suffix("").parts) for f in files]
    return [name.removesuffix(".__init__") for name in dotted]


def test_data_side_imports_without_torch(repo: Path) -> None:
    """One fresh interpreter imports every module of the data side; torch must not have come along."""
    names = [name for part in TORCH_FREE for name in _modules(repo, part)]
    assert len(names) >= 10
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = sorted({'torch', 'transformers', 'tensorboard', 'matplotlib'} & set(sys.modules))\n"
        "    assert not heavy, f'{name} brings in {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_package_itself_is_light() -> None:
    """``import astraflow`` and ``astraflow.testing`` start nothing heavy: a user's test suite stays quick."""
    code = "import sys, astraflow, astraflow.testing\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
