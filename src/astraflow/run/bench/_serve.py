"""The server of the dataflow bench: a process of its own, the real service behind the real server.

    python -m astraflow.run.bench._serve FOLDER STEPS

Writes FOLDER/endpoint.json once it listens; ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from astraflow.dataflow.local import LocalDataflow
from astraflow.dataflow.service import DataflowService
from astraflow.run.bench._load import POLICY, make_spec, manifest
from astraflow.run.layout import write_json
from astraflow.wire.server import Server
from astraflow.wire.tokens import Tokens

ENDPOINT = "endpoint.json"


async def serve(folder: Path, steps: int) -> None:
    tokens = Tokens.make([POLICY])
    tokens.write(folder)
    service = DataflowService.open(make_spec(steps), folder, in_thread=True)
    await service.publish_initial(manifest(0))
    server = Server(LocalDataflow(service), None, tokens=tokens)
    await server.start()
    ticking = asyncio.create_task(service.run())
    write_json(folder / ENDPOINT, {"url": server.url})
    await asyncio.to_thread(sys.stdin.buffer.read)
    ticking.cancel()
    await server.close()
    await service.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
