"""The lean forward pass computes what transformers computes: every family, in chunks, beside others, in bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from astraflow.engines.folder import inverse_frequencies, open_folder
from astraflow.engines.lean import LeanModel
from astraflow.engines.lean_weights import shape_of
from astraflow.engines.rows import Rows, Segment
from astraflow.engines.settings import EngineSettings
from astraflow.errors import WeightsRefused
from tests.unit.engines.models import folder, reference

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama 3 rotary": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}  # fmt: skip


def make(config: Any) -> tuple[Any, LeanModel, Any]:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # biases and norms start as constants, which would hide a mistake
        parameter.data += 0.05 * torch.randn_like(parameter)
    shape = shape_of(config)
    assert shape is not None
    lean = LeanModel(shape, inverse_frequencies(config), slots=4, dtype=torch.float32, device=torch.device("cpu"))
    tensors = {
        name: value for name, value in model.state_dict().items() if not (shape.tied and name == "lm_head.weight")
    }
    return model, lean, lean.prepare(tensors)


def rows_of(*parts: tuple[int, int, np.ndarray]) -> Rows:
    """(slot, start, tokens) of each sequence."""
    ordered = sorted(parts, key=lambda part: len(part[2]) > 1)
    return Rows(
        tokens=np.concatenate([part[2] for part in ordered]).astype(np.int64),
        segments=tuple(Segment(slot, start, len(tokens)) for slot, start, tokens in ordered),
        wanted=(True,) * len(ordered),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    """Prompts in two chunks, then single tokens of three sequences together in slots with a hole between them."""
    model, lean, weights = make(CONFIGS[name])
    rng = np.random.default_rng(3)
    texts = {slot: rng.integers(0, 97, length) for slot, length in ((0, 9), (1, 20), (3, 14))}
    with torch.inference_mode():
        wanted = {slot: model(torch.from_numpy(text)[None]).logits[0] for slot, text in texts.items()}
        lean.forward(weights, rows_of(*((slot, 0, text[:4]) for slot, text in texts.items())))
        lean.forward(weights, rows_of(*((slot, 4, text[4:7]) for slot, text in texts.items())))
        for at in range(7, 20):
            slots = [slot for slot, text in texts.items() if at < len(text)]
            found = lean.forward(weights, rows_of(*((slot, at, texts[slot][at : at + 1]) for slot in slots)))
            for row, slot in zip(found, slots, strict=True):
                assert (row - wanted[slot][at]).abs().max() < 2e-5


def test_a_copied_or_restored_prefix_is_as_good_as_a_computed_one() -> None:
    model, lean, weights = make(CONFIGS["qwen3"])
    text = np.random.default_rng(0).integers(0, 97, 90)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(text)[None]).logits[0, -1]
        lean.forward(weights, rows_of((2, 0, text[:80])))
        lean.copy_prefix(2, 0, 80)
        saved = lean.save_prefix(2, 70)
        lean.restore_prefix(saved, 3, 70)
        assert (lean.forward(weights, rows_of((0, 80, text[80:])))[0] - wanted).abs().max() < 2e-5
        assert (lean.forward(weights, rows_of((3, 70, text[70:])))[0] - wanted).abs().max() < 2e-5


def test_bf16_stays_as_close_to_float32_as_transformers_own_bf16() -> None:
    """Stated tolerance: mean error of a log-prob at most 1.3 times that of transformers in bf16, and below 0.02."""
    path = folder("llama")
    texts = np.random.default_rng(5).integers(7, 90, (6, 40))
    exact = reference(0, "llama")
    rounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    opened = open_folder(path, EngineSettings(slots=6, dtype="bfloat16"))
    weights = opened.model.prepare(load_file(path / "model.safetensors"))
    with torch.inference_mode():
        batch = torch.from_numpy(texts)
        wanted = torch.log_softmax(exact(batch).logits[:, 9:].float(), -1)
        theirs = torch.log_softmax(rounded(batch).logits[:, 9:].float(), -1)
        opened.model.forward(weights, rows_of(*((slot, 0, texts[slot, :9]) for slot in range(6))))
        ours = torch.stack(
            [
                opened.model.forward(weights, rows_of(*((slot, at, texts[slot, at : at + 1]) for slot in range(6))))
                for at in range(9, 40)
            ],
            dim=1,
        )
        ours = torch.log_softmax(ours.float(), -1)
    error, limit = (ours - wanted).abs().mean(), (theirs - wanted).abs().mean()
    assert error < 0.02
    assert error < 1.3 * limit


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "must have shape"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "is missing"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(change: Any, words: str) -> None:
    model, lean, _ = make(CONFIGS["llama"])
    tensors = dict(model.state_dict())
    change(tensors)
    with pytest.raises(WeightsRefused, match=words):
        lean.prepare(tensors)


def test_f74_tied_weights() -> None:
    """One name or both give the same logits after an update; a head that differs from its tie is refused."""
    model, lean, _ = make(CONFIGS["llama, tied"])
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["model.embed_tokens.weight"][1, 0] += 0.5
    with torch.inference_mode():
        model.model.embed_tokens.weight[1, 0] += 0.5
        wanted = model(torch.tensor([[3, 1, 4]])).logits[0, -1]
    one = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    both = one | {"lm_head.weight": one["model.embed_tokens.weight"].clone()}
    for given in (one, both):
        with torch.inference_mode():
            found = lean.forward(lean.prepare(given), rows_of((0, 0, np.array([3, 1, 4]))))[0]
        assert (found - wanted).abs().max() < 1e-6
    stale = one | {"lm_head.weight": model.state_dict()["lm_head.weight"].clone() * 0.5}
    with pytest.raises(WeightsRefused, match="differs"):
        lean.prepare(stale)
    untied, other, _ = make(CONFIGS["llama"])
    headless = {name: value for name, value in untied.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight is missing"):
        other.prepare(headless)


def test_families_that_it_does_not_know_are_left_to_transformers() -> None:
    assert shape_of(MistralConfig(**SIZES, sliding_window=16)) is None
    assert shape_of(LlamaConfig(**SIZES, hidden_act="gelu")) is None
    assert shape_of(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=0)) is None
    assert shape_of(AutoConfig.from_pretrained(folder("qwen3"))) is not None
