from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astraflow.run.tiny_model import TinyModel

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, arch=request.param)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, arch="llama")


@pytest.fixture(scope="session")
def llama_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, arch="llama", dtype="bfloat16")


def build(factory: pytest.TempPathFactory, *, arch: str, dtype: str = "float32") -> Path:
    model = TinyModel(
        arch=arch, hidden=48, layers=2, heads=4, kv_heads=2, intermediate=64, context=256, seed=3, dtype=dtype
    )
    return model.build(factory.mktemp("models") / f"{arch}-{dtype}")
