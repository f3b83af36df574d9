"""A small causal LM built from a config: for tests and for trying ideas in seconds. Same seed, same bits."""

from __future__ import annotations

import hashlib
import json
import shutil
import string
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from astraflow.disk import writing
from astraflow.errors import ConfigError
from astraflow.run.model_cache import OTHER_CACHE, cache_folder

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """Architecture ``llama`` or ``qwen3`` with one token per character and a chat template.

    ``build`` makes the folder under the cache once; the name carries a hash of every field.
    """

    arch: str = "llama"
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    context: int = 512
    characters: str = string.ascii_letters + string.digits + string.punctuation + " \n"
    """Alphabet in the order of the token ids; anything else is ``<|unknown|>``."""
    seed: int = 0
    dtype: str = "float32"
    """Of the folder, hence of every version that is published."""

    def __post_init__(self) -> None:
        if self.arch not in ("llama", "qwen3"):
            raise ConfigError(f"TinyModel.arch must be 'llama' or 'qwen3', found {self.arch!r}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"TinyModel: hidden {self.hidden} must be a multiple of heads {self.heads}, "
                f"and heads of kv_heads {self.kv_heads}"
            )
        if len(set(self.characters)) != len(self.characters):
            raise ConfigError("TinyModel.characters must not repeat a character")

    def build(self, folder: Path | None = None) -> Path:
        """Folder that ``from_pretrained`` loads; an existing one is used as it is. Complete or absent, never half."""
        target = folder or cache_folder() / f"tiny-{self.arch}-{self._hash()}"
        if (target / "config.json").exists():
            return target
        with writing(target, "name another folder" if folder else OTHER_CACHE):
            self._build(target)
        return target

    def _build(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            partial.chmod(0o755)
            self._write(partial)
            if not (target / "config.json").exists():
                partial.replace(target)  # a folder onto an absent or empty one
        except OSError:
            if not (target / "config.json").exists():  # else another process was faster, with the same bits
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _hash(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def _write(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokenizer = self._tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(self._config(len(tokenizer)), dtype=getattr(torch, self.dtype))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _config(self, vocabulary: int) -> Any:
        from transformers import LlamaConfig, Qwen3Config

        common: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": SPECIAL.index("<|end|>"),
            "pad_token_id": SPECIAL.index("<|pad|>"),
        }
        return LlamaConfig(**common) if self.arch == "llama" else Qwen3Config(**common)

    def _tokenizer(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {token: index for index, token in enumerate((*SPECIAL, *self.characters))}
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token="<|pad|>",
            eos_token="<|end|>",
            unk_token="<|unknown|>",
            additional_special_tokens=[t for t in SPECIAL if t not in ("<|pad|>", "<|end|>", "<|unknown|>")],
            model_max_length=self.context,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = TEMPLATE
        return tokenizer
