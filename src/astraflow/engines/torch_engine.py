"""The embedded engine: any Hugging Face causal LM, decoded by torch in a thread of this process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.engines.base import EngineInfo, GenerateReply, GenerateRequest
from astraflow.engines.checkpoint import read_checkpoint
from astraflow.engines.decoder import Decoder
from astraflow.engines.folder import ModelFolder, open_folder
from astraflow.engines.sequence import Held, Sequence
from astraflow.engines.settings import EngineSettings
from astraflow.engines.threads import ThreadTuner, available_cores
from astraflow.errors import BadRequest, NotFound, TimedOut, Unavailable
from astraflow.types import Array, Manifest, Sampling
from astraflow.weights.delta_torch import as_bits
from astraflow.weights.tensors import Tensor

_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter: a decode step asks for it back a thousand times."""
_IDLE_S = 1.0
"""The decode thread looks so often whether it should end, if nothing else wakes it."""


class TorchEngine:
    """Implements ``engines.base.Engine``. Everything that the decoder owns is touched by the decode thread alone; the
    event loop hands it closures and gets its answers by ``call_soon_threadsafe``."""

    def __init__(self, model_dir: Path, policy: str, settings: EngineSettings | None = None) -> None:
        self._policy = policy
        self._settings = settings or EngineSettings()
        self._dir = model_dir
        self._folder: ModelFolder | None = None
        self._decoder: Decoder | None = None
        self._held: tuple[Held, ...] = ()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loading = asyncio.Lock()
        self._pending = 0
        self.pause_s = 0.0
        self.longest_pause_s = 0.0
        """For which the decode thread did not decode because it took weights; all of them, and the longest."""

    # ── the engine's face, on the event loop ──

    def info(self) -> EngineInfo:
        folder = self._open()
        return EngineInfo(
            policy=self._policy,
            max_context=folder.max_context,
            vocabulary=folder.model.vocabulary,
            dtype=str(folder.dtype).removeprefix("torch."),
            versions=tuple(held.version for held in self._held),
            digests={held.version: held.digest for held in self._held},
            slots=self._settings.slots,
            versions_held=self._settings.versions_held,
        )

    async def start(self) -> None:
        """Reads the folder's config and tokenizer; weights come by ``load``. Raises ConfigError."""
        if self._thread is not None:
            return
        self._folder = await asyncio.to_thread(open_folder, self._dir, self._settings)
        self._decoder = Decoder(self._folder.model, self._settings, text_of=self._folder.text_of, now=time.monotonic)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread = threading.Thread(target=self._decode, name=f"decode-{self._policy}", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._ask(request, self._open().end_ids | frozenset(request.sampling.stop_token_ids))

    async def score(self, prompt: Array, reply: Array, version: int) -> Array:
        sampling = Sampling(max_tokens=len(reply), seed=0)
        request = GenerateRequest(tokens=prompt, sampling=sampling, version=version)
        if self._room(request, self._open()) < len(reply):
            raise BadRequest(f"prompt_too_long: {len(prompt)} + {len(reply)} tokens to be scored pass the context")
        return (await self._ask(request, frozenset(), tuple(reply.tolist()))).logprobs

    async def _ask(self, request: GenerateRequest, ends: frozenset[int], given: tuple[int, ...] = ()) -> GenerateReply:
        folder, decoder = self._open(), self._running()
        most = self._room(request, folder)
        if self._pending >= self._settings.max_waiting:
            raise Unavailable(f"engine {self._policy}: {self._pending} requests wait already")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerateReply] = loop.create_future()
        sequence = Sequence(
            request=request,
            most=most,
            ends=ends,
            given=given,
            done=lambda result: self._answer(loop, future, result),
        )
        self._pending += 1
        try:
            self._post(lambda: decoder.submit(sequence))
            return await future
        finally:
            self._pending -= 1
            if future.cancelled():
                self._post(lambda: decoder.cancel(sequence))

    async def load(self, manifest: Manifest, files: list[Path]) -> None:
        async with self._loading:
            held = await asyncio.to_thread(self.prepare, manifest, files)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._settings.pin_wait_s
            while not await self._swap(self._running(), held):
                if loop.time() >= deadline:
                    raise TimedOut(
                        f"engine {self._policy}: v{manifest.version} found no room within "
                        f"{self._settings.pin_wait_s:g} s: requests name {[held.version for held in self._held]}"
                    )
                await asyncio.sleep(0.05)

    def prepare(self, manifest: Manifest, files: list[Path]) -> Held:
        """A weight set for ``swap``, from verified files. Blocking, off the decode path."""
        weights = self._open().model.prepare(read_checkpoint(manifest, files))
        return Held(version=manifest.version, digest=manifest.digest, serial=manifest.serial, weights=weights)

    def tensors(self, version: int) -> Iterable[Tensor] | None:
        held = next((held for held in reversed(self._held) if held.version == version), None)
        if held is None:
            raise NotFound(f"version {version} is not held; held: {[held.version for held in self._held]}")
        shown = self._open().model.tensors(held.weights)
        return None if shown is None else (_bits(name, tensor) for name, tensor in shown)

    async def close(self) -> None:
        """Running requests fail with Unavailable."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)

    def _open(self) -> ModelFolder:
        if self._folder is None:
            raise Unavailable(f"engine {self._policy} has not started")
        return self._folder

    def _running(self) -> Decoder:
        if self._thread is None or self._decoder is None:
            raise Unavailable(f"engine {self._policy} does not run")
        return self._decoder

    def _room(self, request: GenerateRequest, folder: ModelFolder) -> int:
        """Tokens that the reply may have. Raises BadRequest."""
        tokens = request.tokens
        if request.sampling.seed is None:
            raise BadRequest("sampling.seed must be set before the engine")
        if tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
            raise BadRequest(f"prompt must be int32 [P], P >= 1, found {tokens.dtype} {list(tokens.shape)}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= folder.model.vocabulary:
            raise BadRequest(f"prompt has token ids outside [0, {folder.model.vocabulary})")
        room = folder.max_context - len(tokens)
        if room < 1:
            raise BadRequest(
                f"prompt_too_long: {len(tokens)} tokens leave no room in a context of {folder.max_context}"
            )
        return min(request.sampling.max_tokens, room)

    async def _swap(self, decoder: Decoder, held: Held) -> bool:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def swap() -> None:
            began = time.perf_counter()
            done = decoder.swap(held)
            self._held = tuple(decoder.held)
            paused = time.perf_counter() - began
            self.pause_s, self.longest_pause_s = self.pause_s + paused, max(self.longest_pause_s, paused)
            self._answer(loop, future, done)

        self._post(swap)
        return await future

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(job)
            self._wake.notify()

    # ── the decode thread ──

    @staticmethod
    def _answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    def _decode(self) -> None:
        decoder = self._decoder
        assert decoder is not None
        tuner = ThreadTuner(self._thread_choices())
        torch.set_num_threads(tuner.threads)
        while True:
            with self._wake:
                while not (self._inbox or self._closing or decoder.busy):
                    self._wake.wait(_IDLE_S)
                jobs = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            for job in jobs:
                job()
            if closing:
                decoder.fail_all(Unavailable(f"engine {self._policy} was closed"))
                return
            try:
                self._step(decoder, tuner)
            except Exception as error:  # noqa: BLE001 - a failed step (out of memory, a broken kernel) fails its requests
                decoder.fail_all(Unavailable(f"decode step failed: {type(error).__name__}: {error}"))

    @staticmethod
    def _step(decoder: Decoder, tuner: ThreadTuner) -> None:
        before, began = tuner.threads, time.perf_counter()
        rows = decoder.step()
        if rows:
            tuner.took(time.perf_counter() - began, rows)
        if tuner.threads != before:
            torch.set_num_threads(tuner.threads)  # of this thread

    def _thread_choices(self) -> tuple[int, ...]:
        if self._settings.threads:
            return (self._settings.threads,)
        if self._open().device.type != "cpu":
            return (torch.get_num_threads(),)
        return (available_cores(), torch.get_num_threads())


def _bits(name: str, tensor: torch.Tensor) -> Tensor:
    return as_bits({name: tensor.cpu().contiguous()})[name]
