"""The same calls under TLS. The certificate and key beside this file protect nothing: they are for this test alone."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.wire.client import HttpDataflow
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens
from tests.golden.examples import EXAMPLES
from tests.unit.wire.double import ScriptedDataflow
from tests.unit.wire.equal import assert_same

FOLDER = Path(__file__).with_name("tls")


def test_calls_under_tls_and_only_by_who_trusts_the_certificate(tmp_path: Path) -> None:
    async def main() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(FOLDER / "cert.pem", FOLDER / "key.pem")
        tokens = Tokens.make(["p"])
        server = Server(ScriptedDataflow(), None, tokens=tokens, ssl=context)
        await server.start()
        assert server.url.startswith("https://127.0.0.1:")
        async with HttpDataflow(server.url, tokens.worker, ca=FOLDER / "cert.pem") as flow:
            assert_same(await flow.status(), EXAMPLES["StatusReply"])
        async with HttpDataflow(server.url, tokens.worker) as flow:
            with pytest.raises(ConfigError, match="no certificate that is trusted here"):
                await flow.status()
        await server.close()

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())
    for path in (tmp_path / "none.pem", Path(__file__)):
        with pytest.raises(ConfigError, match="cannot be read"):
            HttpDataflow("https://127.0.0.1:1", None, ca=path)
