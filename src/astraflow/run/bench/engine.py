"""The embedded engine against ``model.generate``: the same model, prompts, lengths, precision and threads.

Output lengths are fixed in advance by the seed and end tokens are ignored on both sides; no prompt shares a beginning
with another. The rival gets its prompts in their order, padded to the longest of a batch, and generates until the
longest wanted reply of the batch is done; only wanted tokens count. Our side also gives the log-prob of every token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.errors import RunFailed
from astraflow.run.models import get
from astraflow.types import Array, Sampling
from astraflow.weights.manifest import manifest_of_folder, weight_files_in

SHORTEST_REPLY, LONGEST_REPLY, EQUAL_REPLY = 8, 128, 64
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 48
RIVAL_BATCHES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Work:
    prompts: list[Array]
    """int32 [P] each"""
    lengths: list[int]
    """Wanted tokens of each reply."""

    @property
    def wanted(self) -> int:
        return sum(self.lengths)


def main() -> dict[str, Any]:
    return run()


def run(
    *,
    model_dir: Path | None = None,
    requests: int = 256,
    slots: int = 128,
    threads: int = 2,
    seed: int = 0,
    batches: Sequence[int] = RIVAL_BATCHES,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """{engine_tokens_per_s, generate_tokens_per_s, ratio} for lengths uniform in 8 … 128, the same with the suffix
    ``_equal_lengths`` for replies of 64 tokens each, and what the rival did at each batch size."""
    folder = model_dir or get("smollm2")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found: dict[str, Any] = {}
        for suffix, lengths in (("", (SHORTEST_REPLY, LONGEST_REPLY)), ("_equal_lengths", (EQUAL_REPLY, EQUAL_REPLY))):
            work = make_work(folder, requests=requests, seed=seed, lengths=lengths)
            ours = work.wanted / asyncio.run(_engine_s(folder, work, slots=slots, dtype=dtype))
            theirs = {batch: work.wanted / _generate_s(folder, work, batch=batch, dtype=dtype) for batch in batches}
            best = max(theirs.values())
            found |= {
                f"engine_tokens_per_s{suffix}": ours,
                f"generate_tokens_per_s{suffix}": best,
                f"ratio{suffix}": ours / best,
                f"generate_by_batch{suffix}": {str(batch): value for batch, value in theirs.items()},
            }
    finally:
        torch.set_num_threads(before)
    return found | {"requests": requests, "slots": slots, "threads": threads, "dtype": dtype, "model": folder.name}


def make_work(folder: Path, *, requests: int, seed: int, lengths: tuple[int, int]) -> Work:
    """Prompts of random tokens, the first of which no other prompt begins with."""
    from transformers import AutoConfig

    vocabulary = int(AutoConfig.from_pretrained(folder).vocab_size)
    random = np.random.default_rng(seed)
    firsts = random.choice(vocabulary, requests, replace=vocabulary < requests)
    prompts = []
    for first in firsts:
        rest = random.integers(0, vocabulary, int(random.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)) - 1)
        prompts.append(np.concatenate([[first], rest]).astype(np.int32))
    return Work(prompts, random.integers(lengths[0], lengths[1] + 1, requests).tolist())


async def _engine_s(folder: Path, work: Work, *, slots: int, dtype: str) -> float:
    """Seconds from the first request to the last reply; the model is loaded and has decoded once before."""
    engine = TorchEngine(folder, "policy", EngineSettings(slots=slots, dtype=dtype, end_ids=()))
    await engine.start()
    try:
        await engine.load(manifest_of_folder(folder), weight_files_in(folder))
        await engine.generate(_request(work.prompts[0], 4, seed=0))
        began = time.perf_counter()
        replies = await asyncio.gather(
            *(
                engine.generate(_request(prompt, length, seed=number))
                for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
            )
        )
        took = time.perf_counter() - began
    finally:
        await engine.close()
    _require(replies, work)
    return took


def _request(prompt: Array, length: int, *, seed: int) -> GenerateRequest:
    return GenerateRequest(tokens=prompt, sampling=Sampling(max_tokens=length, seed=seed))


def _require(replies: list[GenerateReply], work: Work) -> None:
    made = [len(reply.logprobs) for reply in replies]
    if made != work.lengths:
        raise RunFailed(f"the engine made {sum(made)} tokens with log-probs, {work.wanted} were wanted")


def _generate_s(folder: Path, work: Work, *, batch: int, dtype: str) -> float:
    """Seconds of ``model.generate`` over all batches; one short call before warms it up."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)

    def generate(prompts: list[Array], length: int) -> None:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt).long()
            mask[row, width - len(prompt) :] = 1
        made = model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=True, top_k=0, top_p=1.0)
        if made.shape[1] != width + length:
            raise RunFailed(f"generate made {made.shape[1] - width} tokens, {length} were wanted")

    with torch.inference_mode():
        generate(work.prompts[:batch], 4)
        began = time.perf_counter()
        for start in range(0, len(work.prompts), batch):
            generate(work.prompts[start : start + batch], max(work.lengths[start : start + batch]))
        return time.perf_counter() - began
