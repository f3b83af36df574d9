"""The real engine, wrong in eight ways: each is named before a token that it sampled leaves, and it recovers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.engines.attested import AttestedEngine
from astraflow.engines.settings import EngineSettings
from astraflow.engines.torch_engine import TorchEngine
from astraflow.errors import EngineFailed, NotFound, TimedOut, Unattested
from astraflow.rollout.template import ChatTemplate
from astraflow.run.bench.faults import WRONG, Version, make_versions, name_of
from astraflow.run.canary import user_says
from astraflow.run.tiny_model import TinyModel
from astraflow.testing.check_engine import check_engine
from astraflow.testing.fake_engine import FakeEngine
from astraflow.testing.faulty_engine import FAULTS, faulty_engine
from astraflow.types import Array, Canary, Manifest
from tests.unit.engines.models import request

SEEN = {
    "dropped tensor": "up_proj.weight",
    "wrong base": "neither as published nor as before",
    "swapped tensors": "are swapped",
    "stale prefix cache": "prompts that no cache can know are right",
    "acknowledged but not applied": "are those of the version before",
    "half-applied": "as before it, in tensor",
    "one flipped bit": "1 bit in 1 element flipped",
    "other chat template": "the first different one at 1",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return TinyModel(hidden=64, layers=3, intermediate=160).build()


@pytest.fixture(scope="module")
def versions(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Version]]:
    yield list(make_versions(folder, tmp_path_factory.mktemp("versions"), seed=1))


def test_the_table_of_faults_is_that_of_the_measure() -> None:
    assert SEEN.keys() == FAULTS.keys() and len(FAULTS) == 8


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_at_the_version_that_has_it(fault: str, folder: Path, versions: list[Version]) -> None:
    said = asyncio.run(name_of(fault, folder, versions))
    assert said.startswith(f"{FAULTS[fault][1].value}: ") and SEEN[fault] in said


@pytest.mark.parametrize(
    "fault", ["stale prefix cache", "acknowledged but not applied", "half-applied", "other chat template"]
)
def test_with_hidden_tensors_the_canary_names_it(fault: str, folder: Path, versions: list[Version]) -> None:
    said = asyncio.run(name_of(fault, folder, versions, hidden=True))
    assert said.startswith(f"{FAULTS[fault][1].value}: ")


def test_with_hidden_tensors_and_without_a_canary_its_word_is_taken_and_that_is_counted(
    folder: Path, versions: list[Version]
) -> None:
    async def main() -> float:
        bare = [(msgspec.structs.replace(manifest, canary=None), files) for manifest, files in versions]
        engine = faulty(folder, "half-applied", hidden=True)
        await loaded(engine, bare)
        await engine.close()
        return engine.metrics()["weights/believed"]

    assert asyncio.run(main()) == len(versions)


def faulty(folder: Path, fault: str, **options: Any) -> AttestedEngine:
    template = ChatTemplate.from_folder(folder)
    settings = EngineSettings(slots=8, threads=1, end_ids=())
    engine = faulty_engine(folder, "policy", settings, fault=fault, **({"at": WRONG} | options))
    return AttestedEngine(engine, render=lambda text: user_says(template, text))


async def loaded(engine: AttestedEngine, versions: list[Version]) -> None:
    await engine.start()
    for manifest, files in versions:
        await engine.load(manifest, files)


def test_the_right_engine_passes_with_threads_and_other_requests_beside(folder: Path, versions: list[Version]) -> None:
    """Other batches, other thread counts, prefill in pieces: drift, and no fault."""

    async def main() -> dict[str, float]:
        settings = EngineSettings(slots=8, threads=2, end_ids=(), prefill_chunk=7, versions_held=2)
        engine = AttestedEngine(TorchEngine(folder, "policy", settings))
        await loaded(engine, versions[:1])
        beside = [asyncio.create_task(engine.generate(request(seed, max_tokens=60))) for seed in range(12)]
        for manifest, files in versions[1:]:
            await engine.load(manifest, files)
        for reply in await asyncio.gather(*beside):
            assert len(reply.tokens) == 60
        await engine.close()
        return engine.metrics()

    found = asyncio.run(main())
    assert (found["weights/attested"], found["weights/refused"]) == (4, 0)
    assert 0 < found["weights/longest_pause_s"] <= found["weights/pause_s"] < found["weights/attest_s"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_in_another_dtype_than_the_files_passes_and_a_fault_in_it_does_not(
    dtype: str, folder: Path, versions: list[Version]
) -> None:
    async def main() -> None:
        settings = EngineSettings(slots=8, threads=1, dtype=dtype)
        engine = AttestedEngine(faulty_engine(folder, "policy", settings, fault="half-applied", at=WRONG))
        await loaded(engine, versions[:WRONG])
        with pytest.raises(Unattested, match="partial: "):
            await engine.load(*versions[WRONG])
        await engine.close()

    asyncio.run(main())


def test_what_wrong_weights_sampled_never_leaves_and_the_next_load_of_the_version_heals(
    folder: Path, versions: list[Version]
) -> None:
    async def main() -> None:
        engine = faulty(folder, "half-applied", times=1)
        await loaded(engine, versions[:WRONG])
        wrong = versions[WRONG][0]
        beside = [asyncio.create_task(engine.generate(request(seed, max_tokens=300))) for seed in range(3)]
        with pytest.raises(Unattested, match="partial: "):
            await engine.load(*versions[WRONG])
        assert engine.info().versions == () and wrong.version not in engine.info().digests
        with pytest.raises(EngineFailed, match=rf"not v{WRONG}: partial: "):
            await engine.generate(request(9, max_tokens=2))
        await engine.load(*versions[WRONG])
        assert engine.info().digests == {wrong.version: wrong.digest}
        for reply in await asyncio.gather(*beside, return_exceptions=True):
            # It ran through wrong weights, whether it ended before or after the good ones came; or ended before both.
            assert isinstance(reply, EngineFailed) or reply.spans[-1].version < WRONG  # type: ignore[union-attr]
        assert (await engine.generate(request(9, max_tokens=2))).spans[0].digest == wrong.digest
        await engine.close()

    asyncio.run(main())


def test_a_past_version_that_is_held_beside_can_be_asked_for_while_the_newest_is_refused(
    folder: Path, versions: list[Version]
) -> None:
    async def main() -> None:
        settings = EngineSettings(slots=8, threads=1, versions_held=2)
        engine = AttestedEngine(faulty_engine(folder, "policy", settings, fault="one flipped bit", at=WRONG))
        await loaded(engine, versions[:WRONG])
        with pytest.raises(Unattested, match="numerics: "):
            await engine.load(*versions[WRONG])
        assert engine.info().versions == (WRONG - 1,)
        reply = await engine.generate(request(1, version=WRONG - 1))
        assert {span.version for span in reply.spans} == {WRONG - 1}
        with pytest.raises(EngineFailed):
            await engine.generate(request(1))
        await engine.close()

    asyncio.run(main())


# ── without a model ──


def manifest_of(version: int, *, serial: int | None = None, digest: str = "", canary: Canary | None = None) -> Manifest:
    return Manifest(
        policy="policy", version=version, digest=digest or f"d{version}", files=(), canary=canary,
        serial=version + 1 if serial is None else serial,
    )  # fmt: skip


class Liar(FakeEngine):
    """Acknowledges, and does nothing."""

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        if manifest.version < 2:
            await super().load(manifest, files)


def test_f56_an_acknowledged_version_that_the_engine_does_not_name_was_never_applied() -> None:
    async def main() -> None:
        engine = AttestedEngine(Liar())
        await engine.load(manifest_of(1), [])
        with pytest.raises(Unattested, match="never applied: the engine acknowledged the version and holds v1"):
            await engine.load(manifest_of(2), [])
        assert engine.info().versions == (1,)

    asyncio.run(main())


def test_f84_an_older_serial_is_not_held_and_that_is_right() -> None:
    async def main() -> None:
        engine = AttestedEngine(FakeEngine())
        await engine.load(manifest_of(2), [])
        await engine.load(manifest_of(1), [])
        assert engine.info().versions == (2,) and engine.metrics()["weights/refused"] == 0

    asyncio.run(main())


class Mute(FakeEngine):
    """Never answers what it is asked for its canary."""

    async def score(self, prompt: Array, reply: Array, version: int) -> Array:
        await asyncio.Event().wait()
        return np.zeros(len(reply), np.float32)


def test_an_engine_that_does_not_answer_is_refused_at_the_deadline_by_name(versions: list[Version]) -> None:
    async def main() -> None:
        engine = AttestedEngine(Mute(tick_s=0.0), deadline_s=0.05)
        with pytest.raises(TimedOut, match=r"weights: the engine could not be looked at within 0.05 s after .* v7"):
            await engine.load(manifest_of(7, canary=versions[0][0].canary), [])
        assert engine.info().versions == ()
        with pytest.raises(EngineFailed, match="v7"):
            await engine.generate(request(1, prompt=4))

    asyncio.run(main())


def test_an_engine_that_does_not_answer_before_the_update_is_named_too(versions: list[Version]) -> None:
    async def main() -> None:
        engine = AttestedEngine(Mute(tick_s=0.0), deadline_s=0.05)
        await engine.load(manifest_of(7), [])
        with pytest.raises(TimedOut, match=r"weights: v7, which the engine still holds, did not answer the canary"):
            await engine.load(manifest_of(8, canary=versions[0][0].canary), [])
        assert engine.info().versions == (7,)

    asyncio.run(main())


def test_conformance_of_an_attested_engine() -> None:
    asyncio.run(
        check_engine(
            make=lambda: AttestedEngine(FakeEngine(slots=4, max_context=64, tick_s=0.0)),
            versions=[(manifest_of(0), []), (manifest_of(1), [])],
        )
    )


def test_a_version_that_is_not_held_shows_no_tensors(folder: Path, versions: list[Version]) -> None:
    async def main() -> None:
        engine = TorchEngine(folder, "policy", EngineSettings(slots=2, threads=1))
        await engine.start()
        await engine.load(*versions[1])
        with pytest.raises(NotFound, match=r"version 0 is not held; held: \[1\]"):
            engine.tensors(0)
        shown = {tensor.name for tensor in engine.tensors(1) or ()}
        assert "model.layers.2.self_attn.v_proj.weight" in shown and "model.norm.weight" in shown
        await engine.close()

    asyncio.run(main())
