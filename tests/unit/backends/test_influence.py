"""Projected gradients: against plain autograd, against whole gradients, and as what Less chooses by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.algorithms.curate import Less
from astraflow.backends import influence
from astraflow.backends.influence import gradient_features, project, save_features
from astraflow.backends.models import load_model
from astraflow.errors import ConfigError
from astraflow.rollout.template import ChatTemplate
from astraflow.run.tiny_model import TinyModel
from astraflow.tasks.features import WithFeatures, stored_features
from astraflow.tasks.generated import GeneratedTasks
from astraflow.tasks.lists import ListTasks
from astraflow.types import Task
from astraflow.workflows.supervised import tokenised


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, characters="0123456789+= ")
    return model.build(tmp_path_factory.mktemp("models"))


def talk(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def rows(name: str, *talks: tuple[str, str]) -> ListTasks:
    return ListTasks(name, [Task(key=f"{name}{n}", payload=talk(*each)) for n, each in enumerate(talks)])


def whole_gradient(folder: Path, task: Task) -> torch.Tensor:
    """By ``backward`` on the plain formula, nothing shared with the code under test."""
    model = load_model(folder, torch.device("cpu"))
    (sample,) = tokenised(ChatTemplate.from_folder(folder), task.payload["messages"])
    ids = torch.tensor(sample.tokens.tolist())
    logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), dim=-1)
    targets = [t for t in range(1, len(ids)) if sample.sampled[t]]
    (-sum(logprobs[t - 1, ids[t]] for t in targets) / len(targets)).backward()  # type: ignore[union-attr]
    return torch.cat([w.grad.reshape(-1) for w in model.parameters()])


def test_projections_are_those_of_the_gradient_of_the_replies(folder: Path) -> None:
    tasks = rows("t", ("1+1=", "2"), ("7+5=", "12"))
    found = gradient_features(folder, tasks, size=64, seed=3)
    for n in range(2):
        task = tasks.task(n)
        wanted = project(whole_gradient(folder, task)[None], size=64, seed=3)[0].numpy()
        assert np.allclose(found[task.key], wanted, rtol=1e-4, atol=1e-5)
        assert found[task.key].dtype == np.float32


def test_inner_products_survive_the_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(4, 9000, generator=generator)
    vectors[1] = vectors[0] + 0.5 * vectors[1]
    true = torch.nn.functional.normalize(vectors, dim=1) @ torch.nn.functional.normalize(vectors, dim=1).T
    small = torch.nn.functional.normalize(project(vectors, size=4096, seed=1), dim=1)
    assert torch.allclose(small @ small.T, true, atol=5 / 4096**0.5)


def test_signs_depend_on_the_seed_and_the_place_alone() -> None:
    one = torch.zeros(1, 5000)
    one[0, 4500] = 1.0
    found = project(one, size=32, seed=1)
    assert torch.allclose(found.abs(), torch.full((1, 32), 32**-0.5))
    longer = torch.nn.functional.pad(one, (0, 3000))
    assert torch.equal(project(longer, size=32, seed=1), found), "what follows changes nothing"
    assert torch.equal(project(one.repeat(3, 1), size=32, seed=1)[2], found[0])
    assert not torch.equal(project(one, size=32, seed=2), found)


def test_many_tasks_are_worked_off_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = rows("t", ("1=", "1"), ("2=", "2"), ("3=", "3"))
    whole = gradient_features(folder, tasks, size=16)
    monkeypatch.setattr(influence, "HELD_BYTES", 1)
    parts = gradient_features(folder, tasks, size=16)
    assert all(np.allclose(parts[key], whole[key], rtol=1e-6) for key in whole)


def test_less_chooses_what_is_like_the_held_out_tasks(folder: Path, tmp_path: Path) -> None:
    train = rows("t", ("1+1=", "2"), ("0 0 0", "9 9 9"), ("8=", "8"), ("1+2=", "3"))
    held_out = rows("h", ("1+1=", "2"))
    for source in (train, held_out):
        save_features(gradient_features(folder, source, size=1024), tmp_path / source.name)
    read = {s.name: WithFeatures(s, "gradient", stored_features(tmp_path / s.name)) for s in (train, held_out)}
    curate = Less(read["t"], held_out=read["h"], group_size=2, fraction=0.25)
    assert curate.influence[0] == pytest.approx(1.0)
    first = curate.next()
    assert first is not None and first.task.key == "t0"
    assert curate.influence.argmin() != 0 and (np.abs(curate.influence) <= 1 + 1e-9).all()


def test_bad_input_names_the_task(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"task 'x': payload\.messages must be a list, found NoneType"):
        gradient_features(folder, ListTasks("t", [Task(key="x")]))
    with pytest.raises(ConfigError, match="size must be at least 1, found 0"):
        gradient_features(folder, rows("t", ("1", "2")), size=0)
    with pytest.raises(ConfigError, match="'n' is unbounded"):
        gradient_features(folder, GeneratedTasks("n", lambda index: Task(key=str(index))))
