"""Manifests of weights that lie in a folder: version 0 of a policy, or a local copy to compare with."""

from __future__ import annotations

from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.types import Manifest
from astraflow.weights.digest import digest_files, form_of_files
from astraflow.weights.store import weight_file_of
from astraflow.wire.names import require_name


def weight_files_in(model_dir: Path) -> list[Path]:
    """The full-weight safetensors files of a Hugging Face folder, by name. ConfigError if there are none."""
    if not model_dir.is_dir():
        raise ConfigError(f"model folder {model_dir} does not exist")
    files = sorted(p for p in model_dir.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if not files:
        raise ConfigError(f"model folder {model_dir} holds no *.safetensors: save the model in that format")
    return files


def manifest_of_folder(
    model_dir: Path, policy: str = "policy", *, version: int = 0, trainer_epoch: int = 0
) -> Manifest:
    """The manifest of the weights in a folder (blocking: hashes every byte twice, once as file, once as tensors)."""
    return manifest_of_files(weight_files_in(model_dir), policy, version=version, trainer_epoch=trainer_epoch)


def manifest_of_files(files: list[Path], policy: str, *, version: int = 0, trainer_epoch: int = 0) -> Manifest:
    """The manifest of the full weights that these files hold together."""
    return Manifest(
        policy=require_name(policy, "policy"),
        version=version,
        digest=digest_files(files),
        files=tuple(weight_file_of(path) for path in files),
        trainer_epoch=trainer_epoch,
        form=form_of_files(files),
    )
