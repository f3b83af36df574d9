"""A recipe resolves to the same config and digest in every process; what decides an episode is in the digests."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.run.config import MOST_CHARS, describe_differences, load_config, resolve, to_plain
from astraflow.run.layout import write_json
from tests.e2e.conftest import GOOD, RECIPE


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"recipe_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(RECIPE.format(body=GOOD))
    return path


def fresh(path: Path, *arguments: str, seed: str = "0") -> tuple[str, str]:
    """Digests as another process finds them."""
    code = (
        "import sys\nfrom astraflow.run.config import resolve\n"
        "found = resolve(sys.argv[1], sys.argv[2:])\nprint(found.digest, found.code_digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    config, sources = done.stdout.split()
    return config, sources


def test_every_process_finds_the_same_digests(recipe_file: Path) -> None:
    here = resolve(str(recipe_file))
    assert fresh(recipe_file, seed="1") == fresh(recipe_file, seed="2") == (here.digest, here.code_digest)


def test_the_config_digest_follows_settings_and_the_seed(recipe_file: Path) -> None:
    plain = resolve(str(recipe_file))
    assert resolve(str(recipe_file), ["steps=7"]).digest != plain.digest
    assert resolve(str(recipe_file), seed=3).digest != plain.digest
    assert resolve(str(recipe_file), ["steps=6"]).digest == plain.digest
    assert resolve(str(recipe_file), seed=3).recipe.seed == 3
    assert resolve(str(recipe_file), ["steps=7"]).code_digest == plain.code_digest


def test_the_seed_reaches_the_pipeline(recipe_file: Path) -> None:
    assert resolve(str(recipe_file), seed=5).config["pipeline"]["curate"]["seed"] == 5


def test_the_code_digest_follows_the_recipe_and_the_files_beside_it(recipe_file: Path) -> None:
    before = fresh(recipe_file)
    helper = recipe_file.with_name("helper_of_this.py")
    helper.write_text("WHAT = 1\n")
    recipe_file.write_text("import helper_of_this\n" + recipe_file.read_text())
    with_helper = fresh(recipe_file)
    helper.write_text("WHAT = 2\n")
    changed = fresh(recipe_file)
    assert len({before[1], with_helper[1], changed[1]}) == 3
    assert before[0] == with_helper[0] == changed[0]
    recipe_file.with_name("not_imported.py").write_text("x = 1\n")
    assert fresh(recipe_file) == changed


def test_a_package_counts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_agents"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "grade.py").write_text("LIMIT = 1\n")
    (package / "duel.py").write_text(RECIPE.format(body=GOOD))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    first = resolve("my_agents.duel:recipe").code_digest
    (package / "grade.py").write_text("LIMIT = 2\n")
    assert resolve("my_agents.duel:recipe").code_digest != first
    assert resolve("my_agents.duel").reference == "my_agents.duel"


def test_stored_and_read_back(recipe_file: Path, tmp_path: Path) -> None:
    resolved = resolve(str(recipe_file), ["steps=7"], 3)
    write_json(tmp_path / "config.json", resolved.as_file())
    again = load_config(tmp_path)
    assert (again.digest, again.code_digest, again.overrides) == (resolved.digest, resolved.code_digest, ("steps=7",))
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["config"]["steps"] == 7
    stored["config"]["group_size"] = 99
    stored["digest"] = "0" * 64
    write_json(tmp_path / "config.json", stored)
    with pytest.raises(ConfigError, match="group_size: 99 → 4"):
        load_config(tmp_path)


def test_differences_name_paths_and_both_values() -> None:
    words = describe_differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "d": 4})
    assert words == "a.b: 1 → 3; c: 2 → None; d: None → 4"
    many = describe_differences({str(i): i for i in range(9)}, {})
    assert many.endswith("and 4 more")


def test_f99_every_process_tells_its_settings_by_path(recipe_file: Path) -> None:
    four, five = (resolve(str(recipe_file), [f"steps={n}"]).settings() for n in (4, 5))
    assert (four["steps"], five["steps"]) == ("4", "5")
    assert {path for path in four.keys() | five.keys() if four.get(path) != five.get(path)} == {"steps"}
    assert all(len(text) <= MOST_CHARS for pair in four.items() for text in pair)


def test_f99_what_is_told_of_a_config_is_bounded_and_long_values_stay_apart(recipe_file: Path) -> None:
    plain = resolve(str(recipe_file))
    one, other = (dataclasses.replace(plain, config={"a": "x" * 9000 + end}).settings()["a"] for end in "yz")
    assert one != other and max(len(one), len(other)) <= MOST_CHARS
    many = dataclasses.replace(plain, config={str(n): n for n in range(5000)})
    assert many.settings() == {}


def test_a_flag_that_would_change_nothing_is_refused(recipe_file: Path) -> None:
    text = recipe_file.read_text().replace("workflow=hashed,", "workflow=hashed, pipeline=ready(split.train),")
    text += (
        "\nfrom astraflow.algorithms.credit import GroupMean\nfrom astraflow.algorithms.curate import Shuffled\n"
        "from astraflow.algorithms.pace import BoundedStaleness\nfrom astraflow.algorithms.pipeline import Pipeline\n"
        "from astraflow.algorithms.select import EarliestDeadline\n\n\ndef ready(tasks):\n"
        "    return Pipeline(curate=Shuffled(tasks, group_size=4), pace=BoundedStaleness(), credit=GroupMean(),\n"
        "                    select=EarliestDeadline())\n"
    )
    built = recipe_file.with_name("built_" + recipe_file.name)
    built.write_text(text)
    resolve(str(built), ["steps=3"])
    with pytest.raises(ConfigError, match="group_size would change nothing"):
        resolve(str(built), ["group_size=8"])
    with pytest.raises(ConfigError, match="seed would change nothing"):
        resolve(str(built), seed=1)


def test_plain_forms() -> None:
    assert to_plain({"a": (1, 2.5, None, True), "p": Path("/x")}) == {"a": [1, 2.5, None, True], "p": "/x"}
    assert to_plain(float("inf")) == "inf"
    assert to_plain({3, 1}) == [1, 3]
    assert to_plain(len) == "builtins:len"
