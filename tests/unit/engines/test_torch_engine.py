"""The embedded engine as the rollout service sees it: threads, files, digests, limits, cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

from astraflow.engines import torch_engine
from astraflow.engines.base import GenerateRequest
from astraflow.engines.settings import EngineSettings
from astraflow.engines.threads import ThreadTuner, available_cores
from astraflow.engines.torch_engine import TorchEngine
from astraflow.errors import BadRequest, ConfigError, DigestMismatch, NotFound, Unavailable, WeightsRefused
from astraflow.testing.check_engine import check_engine
from astraflow.testing.fake_engine import FakeEngine
from astraflow.types import Sampling, StopReason
from astraflow.weights.manifest import manifest_of_files, manifest_of_folder, weight_files_in
from tests.unit.engines.models import folder, logprobs_of, reference, request, spans_of, version


def engine_of(arch: str = "llama", **settings: Any) -> TorchEngine:
    options: dict[str, Any] = {"slots": 4, "threads": 1, "end_ids": ()}
    return TorchEngine(folder(arch), "policy", EngineSettings(**(options | settings)))


def run(body: Callable[[TorchEngine], Coroutine[Any, Any, None]], engine: TorchEngine, *, load: bool = True) -> None:
    async def main() -> None:
        await engine.start()
        try:
            if load:
                await engine.load(*version(0))
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_conformance_of_the_embedded_engine(arch: str) -> None:
    asyncio.run(
        check_engine(
            make=lambda: TorchEngine(folder(arch), "policy", EngineSettings(slots=4, max_context=64)),
            versions=[version(0, arch), version(1, arch)],
        )
    )


def test_conformance_of_the_fake_engine() -> None:
    asyncio.run(
        check_engine(make=lambda: FakeEngine(slots=4, max_context=64, tick_s=0.0), versions=[version(0), version(1)])
    )


def test_f28_prompt_and_reply_never_pass_the_context() -> None:
    async def body(engine: TorchEngine) -> None:
        reply = await engine.generate(request(1, prompt=10, max_tokens=8))
        assert (len(reply.tokens), reply.stop_reason) == (6, StopReason.LENGTH)
        with pytest.raises(BadRequest, match="prompt_too_long: 16 tokens leave no room in a context of 16"):
            await engine.generate(request(1, prompt=16))
        assert len((await engine.generate(request(1, prompt=15))).tokens) == 1

    run(body, engine_of(max_context=16))


@pytest.mark.parametrize(
    ("budget", "cuts", "last"), [(10, (6,), 4), (10, (3, 3, 3), 1), (100, (60,), 40)], ids=["6", "3, 3, 3", "60"]
)
def test_f85_a_resumed_request_asks_for_the_rest_and_repeats_nothing(
    budget: int, cuts: tuple[int, ...], last: int
) -> None:
    """Cut after 6 of 10, thrice after 3, and at more than half: the last call may have 4, 1 and 40 (F85's 400 by a
    tenth), computes only what is new, ends by length, and all together say what one call without a cut says."""

    async def body(engine: TorchEngine) -> None:
        whole = await engine.generate(request(1, max_tokens=budget, temperature=0.0))
        assert engine._decoder is not None
        prompt, said, reasons = request(1).tokens, [], []
        for most in (*cuts, last):
            before = engine._decoder.prefilled
            reply = await engine.generate(request(1, prompt=prompt, max_tokens=most, temperature=0.0))
            assert len(reply.tokens) == most and engine._decoder.prefilled - before <= 1
            prompt, said = np.concatenate([prompt, reply.tokens]), [*said, *reply.tokens.tolist()]
            reasons.append(reply.stop_reason)
        assert len(said) == budget and set(reasons) == {StopReason.LENGTH}
        assert said == whole.tokens.tolist()

    run(body, engine_of())


def test_f88_f84_cancelled_requests_leave_nothing_and_give_nothing() -> None:
    async def body(engine: TorchEngine) -> None:
        running = [asyncio.create_task(engine.generate(request(seed, max_tokens=400))) for seed in range(2)]
        waiting = asyncio.create_task(engine.generate(request(5)))
        await asyncio.sleep(0.05)
        for task in (*running, waiting):
            task.cancel()
        gone = await asyncio.gather(*running, waiting, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in gone)
        assert engine._decoder is not None
        before = engine._decoder.steps
        reply = await engine.generate(request(6, max_tokens=3))
        assert len(reply.tokens) == 3
        assert engine._decoder.steps - before <= 3 + 2
        assert not engine._decoder.busy

    run(body, engine_of(slots=2))


def test_f56_label_comes_from_what_was_loaded(tmp_path: Path) -> None:
    """A starts under version 0, goes on under 1; version 2 fails to load in two ways and 1 serves on."""

    async def body(engine: TorchEngine) -> None:
        a = asyncio.create_task(engine.generate(request(1, max_tokens=480)))
        await asyncio.sleep(0.03)
        await engine.load(*version(1))
        b = await engine.generate(request(2))
        assert spans_of(b) == [(0, 12, 1)]
        labels = [span[2] for span in spans_of(await a)]
        assert labels in ([0, 1], [1])
        claims_two = msgspec.structs.replace(version(2)[0], digest=version(1)[0].digest)
        with pytest.raises(DigestMismatch, match="v2"):
            await engine.load(claims_two, version(2)[1])
        tensors = load_file(version(2)[1][0])
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "part.safetensors")
        part = manifest_of_files([tmp_path / "part.safetensors"], "policy", version=2)
        with pytest.raises(WeightsRefused, match=r"model\.norm\.weight"):
            await engine.load(part, [tmp_path / "part.safetensors"])
        (tmp_path / "torn.safetensors").write_bytes(version(2)[1][0].read_bytes()[:-100])
        with pytest.raises(WeightsRefused):
            await engine.load(version(2)[0], [tmp_path / "torn.safetensors"])
        assert engine.info().versions == (1,)
        c = await engine.generate(request(2))
        assert spans_of(c) == [(0, 12, 1)]
        assert c.tokens.tolist() == b.tokens.tolist()
        assert c.spans[0].digest == version(1)[0].digest

    run(body, engine_of())


def test_f84_two_updates_at_once_end_on_the_newest() -> None:
    async def body(engine: TorchEngine) -> None:
        await asyncio.gather(engine.load(*version(2)), engine.load(*version(1)))
        assert engine.info().versions == (2,)
        await asyncio.gather(engine.load(*version(3)), engine.generate(request(1)))
        assert engine.info().versions == (3,)

    run(body, engine_of())


def test_updates_under_load_label_every_token_with_the_weights_that_made_it() -> None:
    async def body(engine: TorchEngine) -> None:
        asked = [request(seed, max_tokens=60) for seed in range(12)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        for number in (1, 2, 3):
            await asyncio.sleep(0.02)
            await engine.load(*version(number))
        for one, task in zip(asked, tasks, strict=True):
            reply = await task
            assert [span[2] for span in spans_of(reply)] == sorted({span[2] for span in spans_of(reply)})
            for start, stop, number in spans_of(reply):
                wanted = logprobs_of(reference(number), one.tokens, reply.tokens)
                assert np.abs(reply.logprobs[start:stop] - wanted[start:stop]).max() < 1e-5

    run(body, engine_of(kv_on_update="recompute"))


def test_the_event_loop_stays_free_while_the_engine_decodes_and_loads() -> None:
    async def body(engine: TorchEngine) -> None:
        work = asyncio.gather(
            *(engine.generate(request(seed, max_tokens=100)) for seed in range(8)), engine.load(*version(1))
        )
        loop = asyncio.get_running_loop()
        worst = 0.0
        while not work.done():
            at = loop.time()
            await asyncio.sleep(0.001)
            worst = max(worst, loop.time() - at)
        await work
        assert worst < 0.25

    run(body, engine_of())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": np.array([1, 2], np.int64)}, "int32"),
        ({"tokens": np.array([], np.int32)}, "P >= 1"),
        ({"tokens": np.array([1, 9999], np.int32)}, "outside"),
    ],
)
def test_malformed_prompts_are_refused(change: dict[str, Any], words: str) -> None:
    async def body(engine: TorchEngine) -> None:
        with pytest.raises(BadRequest, match=words):
            await engine.generate(msgspec.structs.replace(request(1), **change))
        with pytest.raises(BadRequest, match="seed"):
            await engine.generate(msgspec.structs.replace(request(1), sampling=Sampling()))

    run(body, engine_of())


def test_queue_is_bounded() -> None:
    async def body(engine: TorchEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request(seed, max_tokens=50))) for seed in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="wait already"):
            await engine.generate(request(9))
        await asyncio.gather(*tasks)
        assert len((await engine.generate(request(9))).tokens) == 12

    run(body, engine_of(slots=1, max_waiting=4))


def test_closing_fails_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        engine = engine_of()
        with pytest.raises(Unavailable, match="not started"):
            engine.info()
        await engine.start()
        await engine.start()
        with pytest.raises(NotFound, match="not held"):
            await engine.generate(request(1))
        await engine.load(*version(0))
        task = asyncio.create_task(engine.generate(request(1, max_tokens=490)))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        with pytest.raises(Unavailable, match="closed"):
            await task
        for refused in (engine.generate(request(1)), engine.load(*version(1))):
            with pytest.raises(Unavailable):
                await refused

    asyncio.run(main())


def test_a_broken_step_fails_its_requests_and_the_next_ones_are_served() -> None:
    async def body(engine: TorchEngine) -> None:
        assert engine._folder is not None
        model: Any = engine._folder.model
        forward = model.forward

        def broken(weights: Any, rows: Any) -> torch.Tensor:
            raise RuntimeError("not enough memory")

        model.forward = broken
        with pytest.raises(Unavailable, match="decode step failed: RuntimeError: not enough memory"):
            await engine.generate(request(1))
        model.forward = forward
        assert len((await engine.generate(request(1))).tokens) == 12

    run(body, engine_of())


def test_end_ids_come_from_the_folder_and_from_the_request() -> None:
    async def plain(engine: TorchEngine) -> None:
        reply = await engine.generate(request(1, max_tokens=30))
        found.extend(reply.tokens.tolist())

    async def stopped(engine: TorchEngine) -> None:
        reply = await engine.generate(request(1, max_tokens=30, stop_token_ids=(found[5],)))
        assert reply.tokens.tolist() == found[: found.index(found[5]) + 1]
        assert reply.stop_reason is StopReason.STOP

    found: list[int] = []
    run(plain, engine_of())
    run(stopped, engine_of())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_other_architectures_run_on_transformers_own_forward(name: str, tmp_path: Path) -> None:
    """Tied (GPT-2) and untied (GPT-NeoX); log-probs, updates and load beside hold for them too."""
    sizes = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "gpt2": GPT2Config(**sizes, n_positions=64, bos_token_id=0, eos_token_id=0),
        "gpt_neox": GPTNeoXConfig(**sizes, intermediate_size=48, max_position_embeddings=64),
    }[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "0")
    first = manifest_of_folder(tmp_path / "0", "policy")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "1")
    second = manifest_of_folder(tmp_path / "1", "policy", version=1)

    async def body(engine: TorchEngine) -> None:
        await engine.load(first, weight_files_in(tmp_path / "0"))
        old = await engine.generate(request(1))
        await engine.load(second, weight_files_in(tmp_path / "1"))
        asked = [request(seed, prompt=10 + seed) for seed in range(6)]
        for one, reply in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
            assert spans_of(reply) == [(0, 12, 1)]
            assert np.abs(reply.logprobs - logprobs_of(model, one.tokens, reply.tokens)).max() < 1e-5
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype=torch.float32).eval()
        assert np.abs(old.logprobs - logprobs_of(again, request(1).tokens, old.tokens)).max() < 1e-5

    run(body, TorchEngine(tmp_path / "0", "policy", EngineSettings(slots=4, threads=1, end_ids=())), load=False)


def test_settings_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for wrong in ({"slots": 0}, {"kv_on_update": "maybe"}, {"dtype": "int8"}, {"prefix_cache": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineSettings(**wrong)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        asyncio.run(TorchEngine(tmp_path, "policy").start())
    with pytest.raises(ConfigError, match="longer than the model's"):
        asyncio.run(engine_of(max_context=100_000).start())


def test_a_request_has_no_hidden_state(tmp_path: Path) -> None:
    """The same request twice, minutes of other work between: the same reply."""

    async def body(engine: TorchEngine) -> None:
        one: GenerateRequest = request(1, max_tokens=20)
        first = await engine.generate(one)
        await asyncio.gather(*(engine.generate(request(seed, prompt=3 + seed)) for seed in range(2, 20)))
        second = await engine.generate(one)
        assert first.tokens.tolist() == second.tokens.tolist()
        assert np.abs(first.logprobs - second.logprobs).max() < 1e-5

    run(body, engine_of())


class Alternating(ThreadTuner):
    """Another number of threads with every step, and what it was given to choose from."""

    given: tuple[int, ...] = ()

    def __init__(self, choices: Sequence[int]) -> None:
        type(self).given = tuple(choices)
        super().__init__((1, 2))
        self._steps = 0

    @property
    def threads(self) -> int:
        return 1 + self._steps % 2

    def took(self, seconds: float, rows: int) -> None:
        assert seconds >= 0 and rows > 0
        self._steps += 1


def test_tokens_do_not_depend_on_the_threads_that_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[list[int]]] = []

    async def body(engine: TorchEngine) -> None:
        asked = [engine.generate(request(seed, prompt=20 + seed, max_tokens=24)) for seed in range(6)]
        found.append([reply.tokens.tolist() for reply in await asyncio.gather(*asked)])

    run(body, engine_of())
    monkeypatch.setattr(torch_engine, "ThreadTuner", Alternating)
    run(body, engine_of(threads=0))
    assert found[0] == found[1]
    assert set(Alternating.given) <= {torch.get_num_threads(), available_cores()}
    run(body, engine_of(threads=1))
    assert Alternating.given == (1,), "a number that somebody chose is not changed"
