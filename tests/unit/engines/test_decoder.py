"""Continuous batching step by step, without threads: spans, updates, sharing, cancelling, fairness."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.engines.decoder import Decoder
from astraflow.engines.folder import open_folder
from astraflow.engines.sequence import Held, Sequence
from astraflow.engines.settings import EngineSettings
from astraflow.errors import NotFound, WeightsRefused
from astraflow.types import StopReason
from tests.unit.engines.models import folder, logprobs_of, reference, request, spans_of, version


class Bench:
    """A decoder, its weights by version, and the answers that it gave."""

    def __init__(self, arch: str = "llama", **settings: Any) -> None:
        self.arch = arch
        self.opened = open_folder(folder(arch), EngineSettings(**({"slots": 4, "end_ids": ()} | settings)))
        self.time = 1.0
        self.decoder = Decoder(
            self.opened.model,
            EngineSettings(**({"slots": 4} | settings)),
            text_of=self.opened.text_of,
            now=lambda: self.time,
        )
        self.answers: dict[int, GenerateReply | Exception] = {}
        self.order: list[int] = []
        self.swap(0)

    def held(self, number: int) -> Held:
        manifest, files = version(number, self.arch)
        weights = self.opened.model.prepare(load_file(files[0]))
        return Held(version=number, digest=manifest.digest, serial=manifest.serial, weights=weights)

    def swap(self, number: int) -> bool:
        return self.decoder.swap(self.held(number))

    def submit(self, asked: GenerateRequest, *, ends: frozenset[int] = frozenset()) -> Sequence:
        seed = asked.sampling.seed
        assert seed is not None

        def done(result: GenerateReply | Exception) -> None:
            self.answers[seed] = result
            self.order.append(seed)

        sequence = Sequence(request=asked, most=asked.sampling.max_tokens, ends=ends, done=done)
        self.decoder.submit(sequence)
        return sequence

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.decoder.step()

    def drain(self) -> None:
        for _ in range(2000):
            if not self.decoder.busy:
                return
            self.decoder.step()
        raise AssertionError("the decoder does not end")

    def reply(self, seed: int) -> GenerateReply:
        found = self.answers[seed]
        assert isinstance(found, GenerateReply), found
        return found


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_logprobs_are_those_of_a_plain_forward_pass(arch: str) -> None:
    bench = Bench(arch)
    asked = [request(1), request(2, temperature=0.7), request(3, temperature=0.0), request(4, top_k=3, prompt=30)]
    for one in asked:
        bench.submit(one)
    bench.drain()
    for one in asked:
        reply = bench.reply(one.sampling.seed or 0)
        temperature = one.sampling.temperature or 1.0
        wanted = logprobs_of(reference(0, arch), one.tokens, reply.tokens, temperature)
        assert np.abs(reply.logprobs - wanted).max() <= 1e-5
        assert spans_of(reply) == [(0, 12, 0)]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_load_beside_a_request_does_not_change_its_tokens(arch: str) -> None:
    asked = [request(seed, prompt=5 + 3 * seed, max_tokens=8 + seed) for seed in range(10)]
    together = Bench(arch, prefill_chunk=7)
    for one in asked:
        together.submit(one)
    together.drain()
    for one in asked:
        alone = Bench(arch)
        alone.submit(one)
        alone.drain()
        seed = one.sampling.seed or 0
        assert together.reply(seed).tokens.tolist() == alone.reply(seed).tokens.tolist()
        assert np.abs(together.reply(seed).logprobs - alone.reply(seed).logprobs).max() < 1e-5


def test_chunked_prefill_lets_others_decode() -> None:
    bench = Bench(prefill_chunk=10)
    bench.submit(request(1, max_tokens=50))
    bench.steps(3)
    before = bench.decoder.running[0].sampled
    bench.submit(request(2, prompt=95))
    bench.steps(9)
    first, second = bench.decoder.running
    assert first.sampled == before + 9
    assert second.cached == 90 and second.sampled == 0


def test_prompt_of_a_group_is_computed_once() -> None:
    bench = Bench(slots=8)
    prompt = request(0, prompt=50).tokens
    for seed in range(8):
        bench.submit(request(seed, prompt=prompt, max_tokens=5))
    bench.drain()
    assert bench.decoder.prefilled == 50 + 7  # the last token of each prompt gives its logits
    for seed in range(8):
        assert (
            np.abs(bench.reply(seed).logprobs - logprobs_of(reference(), prompt, bench.reply(seed).tokens)).max() < 1e-5
        )
    assert len({tuple(bench.reply(seed).tokens.tolist()) for seed in range(8)}) == 8


def test_instructions_that_prompts_share_are_computed_once_per_version() -> None:
    """Six prompts of 40 common and 10 own tokens, two slots; then again; then again under new weights."""
    bench = Bench(slots=2)
    common = request(0, prompt=40).tokens

    def ask(first: int) -> int:
        before = bench.decoder.prefilled
        for seed in range(first, first + 6):
            own = request(seed + 100, prompt=10).tokens
            bench.submit(request(seed, prompt=np.concatenate([common, own]), max_tokens=4))
        bench.drain()
        return bench.decoder.prefilled - before

    assert ask(0) == 50 + 5 * 10
    assert ask(10) == 6 * 10
    bench.swap(1)
    assert ask(20) == 50 + 5 * 10
    for seed in range(20, 26):
        prompt = np.concatenate([common, request(seed + 100, prompt=10).tokens])
        assert (
            np.abs(bench.reply(seed).logprobs - logprobs_of(reference(1), prompt, bench.reply(seed).tokens)).max()
            < 1e-5
        )


def test_a_conversation_computes_only_what_is_new_even_if_its_slot_was_taken() -> None:
    bench = Bench(slots=1, prefix_cache=1000)
    opening = request(1, prompt=60)
    bench.submit(opening, ends=frozenset(range(200)))  # ends by itself at its first token
    bench.drain()
    bench.submit(request(2, prompt=70))
    bench.drain()
    longer = np.concatenate([opening.tokens, bench.reply(1).tokens, request(3, prompt=9).tokens])
    before = bench.decoder.prefilled
    bench.submit(request(3, prompt=longer))
    bench.drain()
    assert bench.decoder.prefilled - before == len(longer) - 60
    assert np.abs(bench.reply(3).logprobs - logprobs_of(reference(), longer, bench.reply(3).tokens)).max() < 1e-5


def test_saved_prefixes_stay_within_their_budget() -> None:
    bench = Bench(slots=1, prefix_cache=100)
    for seed in range(6):
        bench.submit(request(seed, prompt=40), ends=frozenset(range(200)))
        bench.drain()
    saved = bench.decoder._prefixes._saved.values()
    assert 0 < sum(len(one.tokens) for one in saved) <= 100


def test_f56_version_label_never_ahead_of_the_weights() -> None:
    """A runs when version 1 comes, B starts after it. Every token's log-prob is that of the weights its span names."""
    bench = Bench(kv_on_update="recompute")
    a, b = request(1, max_tokens=10), request(2, max_tokens=6)
    bench.submit(a)
    bench.steps(4)
    sampled = bench.decoder.running[0].sampled
    bench.swap(1)
    bench.submit(b)
    bench.drain()
    reply = bench.reply(1)
    assert spans_of(reply) == [(0, sampled, 0), (sampled, 10, 1)]
    assert [span.digest for span in reply.spans] == [version(0)[0].digest, version(1)[0].digest]
    old = logprobs_of(reference(0), a.tokens, reply.tokens)
    new = logprobs_of(reference(1), a.tokens, reply.tokens)
    assert np.abs(reply.logprobs[:sampled] - old[:sampled]).max() < 1e-5
    assert np.abs(reply.logprobs[sampled:] - new[sampled:]).max() < 1e-5
    assert np.abs(old - new).max() > 0.01
    assert spans_of(bench.reply(2)) == [(0, 6, 1)]


def test_keeping_the_past_means_the_old_keys_under_the_new_weights() -> None:
    bench = Bench(kv_on_update="keep")
    asked = request(1, max_tokens=10)
    bench.submit(asked)
    bench.steps(4)
    sampled = bench.decoder.running[0].sampled
    bench.swap(1)
    bench.drain()
    reply = bench.reply(1)
    with torch.inference_mode():
        whole = torch.from_numpy(np.concatenate([asked.tokens, reply.tokens])).long()
        cut = len(asked.tokens) + sampled - 1  # the last sampled token was not computed yet when the weights came
        past = reference(0)(whole[None, :cut], use_cache=True).past_key_values
        logits = reference(1)(whole[None, cut:-1], cache=past).logits[0].float()
        wanted = torch.log_softmax(logits, -1).gather(1, whole[cut + 1 :, None]).squeeze(1).numpy()
    assert np.abs(reply.logprobs[sampled:] - wanted).max() < 1e-5


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_prompt_that_has_sampled_nothing_starts_again_under_new_weights(kv: str) -> None:
    bench = Bench(kv_on_update=kv, prefill_chunk=10)
    asked = request(1, prompt=35)
    bench.submit(asked)
    bench.steps(2)
    bench.swap(1)
    bench.drain()
    assert spans_of(bench.reply(1)) == [(0, 12, 1)]
    assert np.abs(bench.reply(1).logprobs - logprobs_of(reference(1), asked.tokens, bench.reply(1).tokens)).max() < 1e-5


def test_a_past_of_two_versions_is_never_shared() -> None:
    bench = Bench(kv_on_update="keep")
    prompt = request(0, prompt=40).tokens
    bench.submit(request(1, prompt=prompt, max_tokens=30))
    bench.steps(5)
    bench.swap(1)
    bench.submit(request(2, prompt=prompt))
    bench.drain()
    assert np.abs(bench.reply(2).logprobs - logprobs_of(reference(1), prompt, bench.reply(2).tokens)).max() < 1e-5


def test_f84_updates_out_of_order_end_on_the_newest() -> None:
    bench = Bench()
    assert bench.swap(2) and bench.swap(1)
    assert [held.version for held in bench.decoder.held] == [2]


def test_a_rollback_has_a_newer_serial_and_is_followed() -> None:
    bench = Bench()
    bench.swap(2)
    back = bench.held(1)
    back.serial = 99
    assert bench.decoder.swap(back)
    assert [held.version for held in bench.decoder.held] == [1]


def test_what_a_rollback_undid_samples_nothing_more() -> None:
    """There is room for both; yet version 2 is going to be other weights, and no older version of a later one."""
    bench = Bench(versions_held=2)
    bench.swap(2)
    assert [held.version for held in bench.decoder.held] == [0, 2]
    back = bench.held(1)
    back.serial = 99
    assert bench.decoder.swap(back)
    assert [held.version for held in bench.decoder.held] == [0, 1]
    bench.submit(request(1, version=2))
    bench.steps(1)
    assert isinstance(bench.answers[1], NotFound)


def test_a_past_version_beside_the_newest_undoes_nothing() -> None:
    bench = Bench(versions_held=3)
    assert bench.swap(5) and bench.swap(3)
    assert [held.version for held in bench.decoder.held] == [0, 3, 5]


def test_two_versions_decode_side_by_side_each_with_its_own_weights() -> None:
    bench = Bench(versions_held=2, slots=6)
    bench.swap(1)
    prompt = request(0, prompt=20).tokens
    for seed in range(6):
        bench.submit(request(seed, prompt=prompt, version=seed % 2))
    bench.drain()
    for seed in range(6):
        reply = bench.reply(seed)
        assert spans_of(reply) == [(0, 12, seed % 2)]
        assert np.abs(reply.logprobs - logprobs_of(reference(seed % 2), prompt, reply.tokens)).max() < 1e-5


def test_a_named_version_stays_until_its_requests_end() -> None:
    bench = Bench(versions_held=2)
    bench.swap(1)
    bench.submit(request(1, version=0, max_tokens=20))
    bench.submit(request(2, max_tokens=20))
    bench.steps(3)
    assert bench.swap(2)  # version 1 goes, for nobody names it
    assert [held.version for held in bench.decoder.held] == [0, 2]
    bench.submit(request(3, version=2, max_tokens=40))
    bench.steps(1)
    assert not bench.swap(3)  # both are named
    bench.drain()
    assert spans_of(bench.reply(1)) == [(0, 20, 0)]
    assert [span[2] for span in spans_of(bench.reply(2))] == [1, 2]
    bench.time += 100
    assert bench.swap(3)
    assert [held.version for held in bench.decoder.held] == [2, 3]


def test_a_version_that_is_not_held_is_not_found() -> None:
    bench = Bench()
    bench.submit(request(1, version=7))
    bench.steps(1)
    assert isinstance(bench.answers[1], NotFound)
    assert not bench.decoder.busy


def test_f88_a_request_that_leaves_frees_its_slot_before_the_next_step() -> None:
    bench = Bench(slots=1)
    leaver = bench.submit(request(1, max_tokens=100))
    waiter = bench.submit(request(2, max_tokens=3))
    never = bench.submit(request(3))
    bench.steps(3)
    for _ in range(2):  # idempotent, and harmless before dispatch
        bench.decoder.cancel(leaver)
        bench.decoder.cancel(never)
    bench.steps(1)
    assert bench.decoder.running == [waiter]
    bench.drain()
    assert list(bench.answers) == [2]
    alone = Bench()
    alone.submit(request(2, max_tokens=3))
    alone.drain()
    assert bench.reply(2).tokens.tolist() == alone.reply(2).tokens.tolist()
    bench.decoder.cancel(waiter)
    assert bench.decoder._free == [0]


def test_a_follower_survives_the_one_whose_prompt_it_waits_for() -> None:
    bench = Bench(prefill_chunk=8)
    prompt = request(0, prompt=60).tokens
    leader = bench.submit(request(1, prompt=prompt))
    bench.submit(request(2, prompt=prompt))
    bench.steps(2)
    bench.decoder.cancel(leader)
    bench.drain()
    assert np.abs(bench.reply(2).logprobs - logprobs_of(reference(), prompt, bench.reply(2).tokens)).max() < 1e-5


def test_first_come_first_served() -> None:
    bench = Bench(slots=2)
    for seed in range(10):
        bench.submit(request(seed, max_tokens=4))
    bench.drain()
    assert bench.order == sorted(bench.order)


def test_f14_and_f26_the_stop_reason_alone_tells_a_cut_reply() -> None:
    """Budget 8. A ends early by an end token, B never does, C does with its last token. Nothing is appended."""
    bench = Bench()
    for seed in (1, 2):
        bench.submit(request(seed, max_tokens=8))
    bench.drain()
    plain = bench.reply(1).tokens.tolist()
    for seed, at in ((1, 2), (2, None), (3, 7)):
        ends = frozenset() if at is None else frozenset({plain[at]})
        assert at is None or plain.index(plain[at]) == at, "the test needs a token that is new at this place"
        asked = msgspec.structs.replace(request(1, max_tokens=8), tokens=request(1).tokens)
        bench.submit(asked, ends=ends)
        bench.drain()
        reply = bench.reply(1)
        assert reply.tokens.tolist() == plain[: 8 if at is None else at + 1]
        assert reply.stop_reason is (StopReason.LENGTH if at is None else StopReason.STOP), seed


def test_stop_strings_end_with_the_token_that_completes_them() -> None:
    bench = Bench()
    bench.submit(request(1, max_tokens=30))
    bench.drain()
    text = bench.opened.text_of(bench.reply(1).tokens.tolist())
    stop = text[10:13]
    bench.submit(request(1, max_tokens=30, stop=("never there", stop)))
    bench.drain()
    found = bench.opened.text_of(bench.reply(1).tokens.tolist())
    assert found == text[: text.index(stop) + len(stop)]
    assert bench.reply(1).stop_reason is StopReason.STOP


def test_weights_that_give_nan_fail_their_requests_by_name() -> None:
    bench = Bench()
    tensors = {name: value * torch.nan for name, value in load_file(version(0)[1][0]).items()}
    broken = Held(version=5, digest="x", serial=50, weights=bench.opened.model.prepare(tensors))
    bench.decoder.swap(broken)
    bench.submit(request(1))
    bench.drain()
    assert isinstance(bench.answers[1], WeightsRefused)
    assert "version 5" in str(bench.answers[1])
