"""A folder whose config states everything is read without transformers; any other by it, with the same outcome."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from astraflow.engines.folder import inverse_frequencies, open_folder
from astraflow.engines.folder_config import _STATED, read_config
from astraflow.engines.lean import LeanModel
from astraflow.engines.lean_weights import shape_of
from astraflow.engines.settings import EngineSettings
from tests.unit.engines.models import folder

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def stated() -> dict[str, Any]:
    found = json.loads((folder() / "config.json").read_text())
    assert found.keys() >= _STATED
    return dict(found)


def written(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_stated_config_says_what_transformers_says(arch: str) -> None:
    theirs, ours = AutoConfig.from_pretrained(folder(arch)), read_config(folder(arch))
    assert isinstance(ours, SimpleNamespace)
    assert shape_of(ours) == shape_of(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.dtype == str(theirs.dtype).removeprefix("torch.")


@pytest.mark.parametrize("missing", sorted(_STATED - {"model_type"}))
def test_what_a_file_leaves_out_is_transformers_default(tmp_path: Path, missing: str) -> None:
    config = {name: value for name, value in stated().items() if name != missing}
    found = read_config(written(tmp_path, config))
    assert isinstance(found, PretrainedConfig)
    assert shape_of(found) == shape_of(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}))


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen2"},
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"rope_parameters": LLAMA_3},
        {"rope_parameters": {"rope_type": "default"}},
        {"head_dim": None},
        {"num_key_value_heads": None},
    ],
)
def test_what_needs_more_than_reading_is_read_by_transformers(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert isinstance(read_config(written(tmp_path, stated() | changed)), PretrainedConfig)


def test_a_window_makes_a_qwen3_generic(tmp_path: Path) -> None:
    config = json.loads((folder("qwen3") / "config.json").read_text())
    windowed = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    found = read_config(written(tmp_path, config | windowed | {"sliding_window": 8}))
    assert isinstance(found, PretrainedConfig)
    assert shape_of(found) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"', "\xff"])
def test_a_file_that_is_no_config_is_refused_by_transformers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((OSError, ValueError, AttributeError, TypeError)):
        read_config(tmp_path)


@pytest.mark.parametrize("rope", [None, LINEAR, LLAMA_3])
@pytest.mark.parametrize("make", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_frequencies_are_those_of_the_model_code(make: Any, rope: dict[str, Any] | None) -> None:
    config = make(num_attention_heads=4, hidden_size=64, rope_parameters=rope and dict(rope))
    assert torch.equal(inverse_frequencies(config), LlamaRotaryEmbedding(config).inv_freq)


def test_a_worker_starts_without_transformers() -> None:
    """Its modules take as long to import as torch: a replacement is there in half the time without them."""
    code = (
        "import sys; from pathlib import Path; import astraflow.run.serve_rollout;"
        "from astraflow.engines.folder import open_folder; from astraflow.engines.settings import EngineSettings;"
        f"open_folder(Path({str(folder())!r}), EngineSettings());"
        "print(*(m for m in ('transformers', 'sympy', 'accelerate') if m in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr


def test_the_model_of_a_stated_folder_is_the_lean_one() -> None:
    assert isinstance(open_folder(folder(), EngineSettings()).model, LeanModel)
