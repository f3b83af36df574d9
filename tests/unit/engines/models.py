"""Tiny real models on disk, and versions of them, for the tests of the embedded engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.run.tiny_model import TinyModel
from astraflow.types import Array, Manifest, Sampling
from astraflow.weights.manifest import manifest_of_files, weight_files_in

Version = tuple[Manifest, list[Path]]


@cache
def folder(arch: str = "llama") -> Path:
    """About 0.2 M parameters, float32."""
    root = Path(mkdtemp(prefix="astraflow-tiny-"))
    return TinyModel(arch=arch, hidden=64, layers=3, heads=4, kv_heads=2, intermediate=160).build(root / arch)


@cache
def version(number: int, arch: str = "llama", serial: int | None = None) -> Version:
    """Version 0 is the folder's; each later one is disturbed by its own noise, so that its logits differ clearly."""
    files = weight_files_in(folder(arch))
    if number:
        noise = torch.Generator().manual_seed(number)
        tensors = {
            name: value + 0.1 * torch.randn(value.shape, generator=noise) for name, value in load_file(files[0]).items()
        }
        path = Path(mkdtemp(prefix="astraflow-tiny-")) / "model.safetensors"
        save_file(tensors, path)
        files = [path]
    manifest = manifest_of_files(files, "policy", version=number)
    return msgspec.structs.replace(manifest, serial=number + 1 if serial is None else serial), files


@cache
def reference(number: int = 0, arch: str = "llama") -> torch.nn.Module:
    """transformers' own model with the weights of a version."""
    model = AutoModelForCausalLM.from_pretrained(folder(arch), dtype=torch.float32)
    missing = model.load_state_dict(load_file(version(number, arch)[1][0]), strict=False)
    assert not missing.unexpected_keys
    model.tie_weights()
    return model.eval()


def logprobs_of(model: torch.nn.Module, prompt: Array, reply: Array, temperature: float = 1.0) -> Array:
    """float32 [N]: of the reply's tokens, by one plain forward pass."""
    with torch.inference_mode():
        tokens = torch.from_numpy(np.concatenate([prompt, reply])).long()
        logits = model(tokens[None]).logits[0].float() / temperature
        found = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return found.gather(1, tokens[len(prompt) :, None]).squeeze(1).numpy()


def request(seed: int, *, prompt: Array | int = 12, version: int | None = None, **sampling: object) -> GenerateRequest:
    """A prompt of so many tokens drawn from the seed, or the given one."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(seed).integers(7, 60, prompt).astype(np.int32)
    options = {"max_tokens": 12, "seed": seed} | sampling
    return GenerateRequest(tokens=prompt, sampling=Sampling(**options), version=version)


def spans_of(reply: GenerateReply) -> list[tuple[int, int, int]]:
    return [(span.start, span.stop, span.version) for span in reply.spans]
