"""Policies served by other workers, over real sockets: the same replies, the same errors, no caller left waiting."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from astraflow.engines.base import GenerateReply, GenerateRequest
from astraflow.errors import BadRequest, ConfigError, EngineFailed, Unavailable
from astraflow.rollout.elsewhere import Elsewhere, RemoteEngine
from astraflow.rollout.endpoint import PATH, PolicyEndpoint
from astraflow.rollout.served import ServedPolicy
from astraflow.testing.fake_engine import FakeEngine
from astraflow.types import Manifest, Sampling
from astraflow.wire.client import trusting

TOKEN = "worker-token-of-the-run"
TLS = Path(__file__).parents[1] / "wire" / "tls"


def request(seed: int = 5, *, tokens: int = 3, version: int | None = None, most: int = 50) -> GenerateRequest:
    sampling = Sampling(max_tokens=most, seed=seed)
    return GenerateRequest(tokens=np.arange(tokens, dtype=np.int32), sampling=sampling, version=version)


async def fake(*versions: int, **fields: Any) -> FakeEngine:
    engine = FakeEngine(policy="p", tick_s=0.001, versions_held=2, **fields)
    for version in versions or (3,):
        await engine.load(Manifest(policy="p", version=version, digest=f"d{version}", files=(), serial=version), [])
    return engine


@asynccontextmanager
async def serving(
    engine: FakeEngine, *, token: str | None = TOKEN, hold: Any = None, ssl: Any = None
) -> AsyncIterator[PolicyEndpoint]:
    async def held(policy: str, version: int) -> None: ...

    served = ServedPolicy("p", engine, lambda load: None)  # type: ignore[arg-type, return-value]
    endpoint = PolicyEndpoint({"p": served}, hold or held, token=token, ssl=ssl)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def remote(
    *urls: str, token: str | None = TOKEN, patience_s: float = 5.0, trust: Any = None
) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine("p", token=token, patience_s=patience_s, trust=trust)
    await engine.know(urls)
    try:
        yield engine
    finally:
        await engine.close()


async def busy(engine: FakeEngine, requests: int) -> None:
    async with asyncio.timeout(5):
        while engine.busy != requests:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.01)


def same(one: GenerateReply, two: GenerateReply) -> bool:
    arrays = np.array_equal(one.tokens, two.tokens) and np.array_equal(one.logprobs, two.logprobs)
    return arrays and one.spans == two.spans and one.stop_reason == two.stop_reason


def test_a_reply_from_elsewhere_is_the_engine_s_own() -> None:
    async def main() -> None:
        engine = await fake()
        async with serving(engine) as endpoint, remote(endpoint.url) as away:
            assert away.is_reachable and away.info() == engine.info()
            found = await asyncio.gather(*(away.generate(request(seed)) for seed in range(20)))
            for seed, reply in enumerate(found):
                assert same(reply, await engine.generate(request(seed)))

    asyncio.run(main())


def test_under_tls_only_who_trusts_the_certificate_asks() -> None:
    async def main() -> None:
        engine = await fake()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        async with serving(engine, ssl=context) as endpoint:
            assert endpoint.url.startswith("https://127.0.0.1:")
            async with remote(endpoint.url, trust=trusting(TLS / "cert.pem")) as away:
                assert same(await away.generate(request()), await engine.generate(request()))
            async with remote(endpoint.url) as stranger:
                assert not stranger.is_reachable

    asyncio.run(main())


def test_an_endpoint_says_the_address_that_its_certificate_is_for() -> None:
    engine = RemoteEngine("p", token=None)
    endpoint = PolicyEndpoint({}, lambda policy, at: engine.start(), host="0.0.0.0", address="b2.example", token="t")
    assert endpoint.url == "http://b2.example:0"


def test_errors_of_the_engine_keep_their_class() -> None:
    async def main() -> None:
        async with serving(await fake(max_context=16)) as endpoint, remote(endpoint.url) as away:
            with pytest.raises(BadRequest, match="prompt_too_long: 16 tokens leave no room in a context of 16"):
                await away.generate(request(tokens=16))
            with pytest.raises(Exception, match="version 9 is not held"):
                await away.generate(request(version=9))

    asyncio.run(main())


def test_f96_bytes_that_are_no_text_are_a_wrong_token() -> None:
    async def main() -> None:
        async with serving(await fake()) as endpoint:
            host, port = endpoint.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {PATH}/p HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ".encode() + b"\xff\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("token", [None, "", "another-token", TOKEN + "x"])
def test_f96_only_workers_of_the_run_may_ask(token: str | None) -> None:
    async def main() -> None:
        engine = await fake()
        async with serving(engine) as endpoint:
            async with remote(endpoint.url, token=token) as away:
                assert not away.is_reachable
            async with aiohttp.ClientSession() as session:
                for method, path in (("GET", f"{PATH}/p"), ("POST", f"{PATH}/p/generate")):
                    async with session.request(method, endpoint.url + path, data=b"x") as answer:
                        assert answer.status == 401
                        assert TOKEN.encode() not in await answer.read()
            assert engine.steps == 0

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\xdf\xff\xff\xff\xff", b"x" * 1000])
def test_hostile_bytes_are_refused_in_one_sentence(body: bytes) -> None:
    async def main() -> None:
        async with serving(await fake()) as endpoint, aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with session.post(f"{endpoint.url}{PATH}/p/generate", data=body, headers=headers) as answer:
                assert answer.status == 400
            async with session.get(f"{endpoint.url}{PATH}/..%2Fq", headers=headers) as answer:
                assert answer.status == 404

    asyncio.run(main())


def test_beyond_loopback_a_token_is_needed() -> None:
    async def main() -> None:
        served = ServedPolicy("p", await fake(), lambda load: None)  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match=r"serving policies at 0.0.0.0 without a token is refused"):
            PolicyEndpoint({"p": served}, None, host="0.0.0.0", token=None)  # type: ignore[arg-type]

    asyncio.run(main())


def test_a_place_that_dies_is_left_out_and_its_requests_go_to_another() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            first, second = await fake(), await fake()
            dying = await stack.enter_async_context(serving(first))
            other = await stack.enter_async_context(serving(second))
            away = await stack.enter_async_context(remote(dying.url, other.url))
            await asyncio.gather(*(away.generate(request(seed)) for seed in range(8)))
            assert first.steps and second.steps, "places take turns"
            await dying.close()
            replies = await asyncio.gather(*(away.generate(request(seed)) for seed in range(8)))
            for seed, reply in enumerate(replies):
                assert same(reply, await second.generate(request(seed)))
            await away.know([dying.url, other.url])
            assert away.is_reachable
            await away.know([dying.url])
            assert not away.is_reachable
            assert away.info().max_context == 4096, "episodes that are being played still know what they play with"

    asyncio.run(main())


def test_f87_without_any_place_a_request_ends_by_name_within_its_budget() -> None:
    async def main() -> None:
        async with remote("http://127.0.0.1:9", patience_s=0.5) as away:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match=r"p: no worker that serves it answered within 0.5 s"):
                await away.generate(request())
            assert asyncio.get_running_loop().time() - began < 5
            with pytest.raises(EngineFailed, match="no worker that serves it can be reached"):
                away.info()

    asyncio.run(main())


def test_a_request_waits_for_a_place_that_comes_in_time() -> None:
    async def main() -> None:
        async with remote(patience_s=30.0) as away, serving(await fake()) as endpoint:
            asked = asyncio.ensure_future(away.generate(request()))
            await asyncio.sleep(0.1)
            assert not asked.done()
            await away.know([endpoint.url])
            assert (await asked).tokens.size

    asyncio.run(main())


def test_f88_a_caller_that_leaves_frees_the_slot() -> None:
    async def main() -> None:
        engine = await fake(end_chance=1e-9, slots=1, max_context=1 << 20)
        async with serving(engine) as endpoint, remote(endpoint.url) as away:
            asked = asyncio.ensure_future(away.generate(request(most=100_000)))
            await busy(engine, 1)
            asked.cancel()
            await busy(engine, 0)
            assert (await away.generate(request(most=3))).tokens.size == 3

    asyncio.run(main())


def test_a_pinned_version_is_held_by_whoever_serves_it() -> None:
    async def main() -> None:
        engine = await fake(3)
        asked: list[tuple[str, int]] = []

        async def hold(policy: str, version: int) -> None:
            asked.append((policy, version))
            manifest = Manifest(policy=policy, version=version, digest="past", files=(), serial=1)
            await engine.load(manifest, [])

        async with serving(engine, hold=hold) as endpoint, remote(endpoint.url) as away:
            reply = await away.generate(request(version=1))
            assert {(span.version, span.digest) for span in reply.spans} == {(1, "past")}
            assert asked == [("p", 1)]
            newest = await away.generate(request())
            assert {span.version for span in newest.spans} == {3}

    asyncio.run(main())


def test_a_place_without_weights_is_not_there_yet() -> None:
    async def main() -> None:
        engine = FakeEngine(policy="p")
        async with serving(engine) as endpoint, remote(endpoint.url) as away:
            assert not away.is_reachable

    asyncio.run(main())


def test_a_worker_s_place_among_others() -> None:
    async def main() -> None:
        async with serving(await fake()) as endpoint:
            engines = [RemoteEngine("p", token=TOKEN), RemoteEngine("q", token=TOKEN)]
            elsewhere = Elsewhere(engines)
            assert (elsewhere.url, elsewhere.reachable) == ("", ())
            await elsewhere.know({"p": (endpoint.url,), "unheard of": ("http://127.0.0.1:9",)})
            assert elsewhere.reachable == ("p",)
            await elsewhere.know({})
            assert elsewhere.reachable == ()
            await elsewhere.close()

    asyncio.run(main())
