"""Which prompts a policy's canary has, and what its reference is: made where a version is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from astraflow.rollout.template import ChatTemplate
from astraflow.types import Canary, CanaryPrompt

TEXTS = ("What is 17 + 25? Think first.", "Name three colours, then stop.", "Write a list of two small numbers: [")
"""Warm ones: what users say in every version."""
REPLY = "The answer is 42, because 17 plus 25 is 42."
COLD = 3
"""Prompts that differ with every version, from their first token on: of random tokens, and without the template, whose
beginning a cache would know."""
COLD_TOKENS = 24
LETTERS = "The five boxing wizards jump quickly over 13,467,289.50 small brown dogs; why?"
"""Whose tokens the cold prompts are made of."""
MOST_REPLY = 16
"""Tokens of each reply: so many decode steps it takes to prove an engine."""


def prompts_of(template: ChatTemplate, digest: str) -> list[CanaryPrompt]:
    """Those of a version with this digest, not yet answered (log-probs 0)."""
    reply = tuple(template.encode_reply(REPLY)[:MOST_REPLY])
    nothing = (0.0,) * len(reply)
    found = []
    for text in TEXTS:
        tokens, shown = tuple(user_says(template, text)), "" if template.dated else text
        found.append(CanaryPrompt(text=shown, tokens=tokens, reply=reply, logprobs=nothing))
    letters = sorted(set(template.encode_reply(LETTERS)))
    drawn = np.random.default_rng(int(digest[:16], 16)).permuted(np.resize(letters, (COLD, COLD_TOKENS)), axis=1)
    return found + [
        CanaryPrompt(tokens=tuple(tokens), reply=reply, logprobs=nothing, cold=True) for tokens in drawn.tolist()
    ]


def user_says(template: ChatTemplate, text: str) -> list[int]:
    """The prompt's tokens when a user says this and the assistant is to answer."""
    return template.encode(template.render([{"role": "user", "content": text}]))


def canary_of(model_dir: Path) -> Callable[[Sequence[Path], str], Canary]:
    """What makes the canary of published files with a digest. Blocking; imports torch when it is called."""
    template = ChatTemplate.from_folder(model_dir)

    def make(files: Sequence[Path], digest: str) -> Canary:
        from astraflow.backends.reference import DTYPE, reference_logprobs

        prompts = prompts_of(template, digest)
        said = reference_logprobs(model_dir, files, [(each.tokens, each.reply) for each in prompts])
        answered = zip(prompts, said, strict=True)
        return Canary(dtype=DTYPE, prompts=tuple(_answered(prompt, logprobs) for prompt, logprobs in answered))

    return make


def _answered(prompt: CanaryPrompt, logprobs: tuple[float, ...]) -> CanaryPrompt:
    return msgspec.structs.replace(prompt, logprobs=logprobs)
