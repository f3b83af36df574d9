"""Are eight ways to get weights wrong found, and named, before the engine serves the version? On the real engine.

Four versions of a tiny model; the engine (``testing.faulty_engine``) gets the last of them wrong. Once with its tensors
to be seen, which is the default, and once with the canary's prompts alone, as for an engine that hides them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from astraflow.engines.attested import AttestedEngine
from astraflow.engines.settings import EngineSettings
from astraflow.errors import Unattested
from astraflow.rollout.template import ChatTemplate
from astraflow.run.canary import canary_of, user_says
from astraflow.run.tiny_model import TEMPLATE, TinyModel
from astraflow.testing.faulty_engine import FAULTS, faulty_engine
from astraflow.types import Manifest
from astraflow.weights.manifest import manifest_of_files, weight_files_in

WRONG = 3
"""The version that the engine gets wrong; it has taken those before."""
OTHER_TEMPLATE = TEMPLATE.replace("'<|' + m['role'] + '|>'", "'<|' + m['role'] + '|>\\n'")
Version = tuple[Manifest, list[Path]]


def faults_named(*, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """What each fault was called, and how many of the names are right: as the weights' bench prints them."""
    with tempfile.TemporaryDirectory() as place:
        model = TinyModel(hidden=64, layers=3, intermediate=160, dtype=dtype, seed=seed)
        versions = list(make_versions(model.build(), Path(place), seed=seed))
        found: dict[str, Any] = {}
        for way, hidden in (("tensors", False), ("canary_alone", True)):
            began = time.perf_counter()
            names = {fault: asyncio.run(name_of(fault, model.build(), versions, hidden=hidden)) for fault in FAULTS}
            right = sum(name.partition(":")[0] == FAULTS[fault][1].value for fault, name in names.items())
            found[way] = {"named": f"{right} of {len(FAULTS)}", "s": time.perf_counter() - began, **names}
    return found


def make_versions(folder: Path, place: Path, *, seed: int, share: float = 0.3, scale: float = 1.0) -> Iterator[Version]:
    """The folder's weights, then each time this share of the elements moved by so much of their deviation."""
    noise = torch.Generator().manual_seed(seed)
    make = canary_of(folder)
    files = weight_files_in(folder)
    tensors = load_file(files[0])
    for version in range(WRONG + 1):
        if version:
            tensors = {name: _moved(tensor, noise, share, scale) for name, tensor in tensors.items()}
            files = [place / str(version) / "model.safetensors"]
            files[0].parent.mkdir()
            save_file(tensors, files[0])
        manifest = manifest_of_files(files, "policy", version=version)
        canary = make(files, manifest.digest)
        yield msgspec.structs.replace(manifest, serial=version + 1, canary=canary), files


async def name_of(fault: str, folder: Path, versions: list[Version], *, hidden: bool = False) -> str:
    """``diagnosis: what was seen`` of the version that the engine gets wrong; empty: it passed."""
    template = ChatTemplate.from_folder(folder)
    engine = faulty_engine(folder, "policy", EngineSettings(slots=8, threads=1), fault=fault, at=WRONG, hidden=hidden)
    attested = AttestedEngine(engine, render=lambda text: user_says(template, text))
    await attested.start()
    try:
        for manifest, files in versions:
            if fault == "other chat template" and manifest.version == WRONG:
                template = other_template(folder)
            await attested.load(manifest, files)
    except Unattested as error:
        return str(error) if manifest.version == WRONG else f"v{manifest.version} was refused: {error}"
    finally:
        await attested.close()
    return ""


def other_template(folder: Path) -> ChatTemplate:
    """The folder's tokenizer with a template that differs by a line break."""
    return ChatTemplate((folder / "tokenizer.json").read_text(), OTHER_TEMPLATE)


def _moved(tensor: torch.Tensor, noise: torch.Generator, share: float, scale: float) -> torch.Tensor:
    step = torch.randn(tensor.shape, generator=noise) * float(tensor.float().std().nan_to_num(0.0)) * scale
    chosen = torch.rand(tensor.shape, generator=noise) < share
    return (tensor.float() + step * chosen).to(tensor.dtype)
