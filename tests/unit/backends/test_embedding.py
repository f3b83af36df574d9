"""A vector a task by a model's hidden states: what it is, that texts which are alike are near, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.backends.embedding import embedding_features
from astraflow.errors import ConfigError
from astraflow.run.cli import main
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.features import WithFeatures, stored_features
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.jsonl import JsonlTasks
from astraflow.tasks.lists import ListTasks
from astraflow.types import Array, Task

TEXTS = {"a": "12+34", "b": "12+35", "c": "zzzz zzz", "d": "zzz zzzz"}


def source(texts: dict[str, str]) -> ListTasks:
    return ListTasks("rows", [Task(key=key, payload={"question": text}) for key, text in texts.items()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, characters="0123456789+z ")
    return model.build(tmp_path_factory.mktemp("models"))


def cosine(one: Array, two: Array) -> float:
    return float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))


def test_it_is_the_mean_of_the_last_hidden_states_less_that_of_all_tasks(folder: Path) -> None:
    """By transformers alone, with its own chat template."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    means = {}
    for key, text in TEXTS.items():
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(said, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            means[key] = model(ids, output_hidden_states=True).hidden_states[-1][0].float().mean(dim=0).numpy()
    middle = np.mean(list(means.values()), axis=0)
    found = embedding_features(folder, source(TEXTS), field="question", device="cpu")
    assert list(found) == list(TEXTS)
    for key, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, means[key] - middle, atol=1e-5)


def test_texts_that_are_alike_are_near_and_others_are_not(folder: Path) -> None:
    found = embedding_features(folder, source(TEXTS), field="question", device="cpu")
    assert min(cosine(found["a"], found["b"]), cosine(found["c"], found["d"])) > 0.5
    assert max(cosine(found[x], found[y]) for x in "ab" for y in "cd") < 0


def test_what_has_no_text_or_no_end_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="task 'a' has no text in 'prompt'; it has question"):
        embedding_features(folder, source(TEXTS), field="prompt")
    with pytest.raises(ConfigError, match="'endless' is unbounded"):
        endless = GeneratedTasks("endless", lambda n: Task(key=str(n), payload={"question": "1"}))
        embedding_features(folder, endless, field="question")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in TEXTS.items()))
    (tmp_path / "sources.py").write_text(
        "from astraflow.tasks.jsonl import JsonlTasks\n\n\n"
        f"def rows():\n    return JsonlTasks({str(path)!r}, key='id')\n\n\n"
        "def number():\n    return 7\n"
    )
    return path


def test_the_command_writes_what_a_recipe_reads(
    folder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, with_model = tmp_path / "rows.safetensors", ["--field", "text", "--model", str(folder)]
    assert main(["tasks", "features", f"{rows.parent}/sources.py:rows", str(out), *with_model]) == 0
    assert capsys.readouterr().out == f"{out}: 4 tasks, 16 numbers each\n"
    assert set(load_file(out)) == set(TEXTS)
    tasks = WithFeatures(JsonlTasks(rows, key="id"), "embedding", stored_features(out))
    assert tasks.task(0).features["embedding"].shape == (16,)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []
    assert main(["tasks", "features", str(rows), str(out), *with_model]) == 0
    assert set(load_file(out)) == {JsonlTasks(rows).task(n).key for n in range(4)}, "keys of rows without a key field"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{rows}.jsonl", "rows.jsonl.jsonl"),
        ("{folder}/sources.py:number", "made int, which is no task source"),
        ("{folder}/sources.py:none", "it must define a function none()"),
        ("{folder}/nowhere.py:rows", "there is no file"),
        ("no.such.module:rows", "importable"),
        ("{rows}", "no text in 'question'"),
    ],
)
def test_what_the_command_refuses_says_what_and_leaves_no_file(
    source: str, words: str, folder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    named = source.format(rows=rows, folder=rows.parent)
    assert main(["tasks", "features", named, str(out), "--model", str(folder)]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_is_not_there_is_refused_before_the_work(
    folder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "features", str(rows), str(tmp_path / "no" / "out"), "--model", str(folder)]) == 2
    assert "make it, or name another" in capsys.readouterr().err
