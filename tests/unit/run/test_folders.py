"""Run folders, tiny models, version 0, children and their lifeline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.run.child import LIFELINE, ORPHANED, Child, ChildSpec, read_tail, shared_cores
from astraflow.run.layout import RunFolder, new_run_folder, read_json, write_json
from astraflow.run.models import get
from astraflow.run.tiny_model import TinyModel


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    assert new_run_folder(tmp_path, "quick").path.name == "quick-001"
    (tmp_path / "quick-007").mkdir()
    (tmp_path / "quick-start-050").mkdir()
    assert new_run_folder(tmp_path, "quick").path.name == "quick-008"


def test_f69_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create()
    run.create()  # still empty of a run
    write_json(run.config, {})
    with pytest.raises(ConfigError, match="already holds a run"):
        run.create()


def test_small_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_json(path)
    with pytest.raises(ConfigError, match="missing"):
        read_json(tmp_path / "y.json")


def test_no_endpoint_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no running dataflow"):
        RunFolder(tmp_path).url()


SMALL = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "context": 64}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_tiny_models_are_the_same_bits_for_the_same_seed(tmp_path: Path, arch: str) -> None:
    one = TinyModel(arch=arch, **SMALL).build(tmp_path / "a")
    two = TinyModel(arch=arch, **SMALL).build(tmp_path / "b")
    other = TinyModel(arch=arch, seed=1, **SMALL).build(tmp_path / "c")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_tiny_models_speak_in_characters(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TinyModel(**SMALL).build(tmp_path / "m"))
    ids = tokenizer("a b\n1", add_special_tokens=False).input_ids
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a b\n1"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>hi<|end|><|assistant|>yo<|end|>"
    assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True).endswith("<|assistant|>")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"arch": "gpt"}, "'llama' or 'qwen3'"), ({"hidden": 15}, "multiple"), ({"characters": "aa"}, "repeat")],
)
def test_tiny_models_refuse(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TinyModel(**{**SMALL, **wrong})  # type: ignore[arg-type]


def test_a_known_model_is_not_built_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        get("smollm2", tmp_path)
    with pytest.raises(ConfigError, match="is unknown; known: smollm2"):
        get("llama9")


# ── children ──


def test_cores_are_shared() -> None:
    assert shared_cores(2, cores=2)["OMP_NUM_THREADS"] == "1"
    assert shared_cores(2, cores=16)["OMP_NUM_THREADS"] == "8"
    assert shared_cores(9, cores=2)["OMP_NUM_THREADS"] == "1"
    assert shared_cores(2, cores=2)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "GOMP_SPINCOUNT" not in shared_cores(2, cores=2)
    assert int(shared_cores(2, cores=2, decodes=True)["GOMP_SPINCOUNT"]) > 0


def test_a_child_ends_when_its_launcher_is_gone() -> None:
    code = (
        "import time\nfrom astraflow.run.child import hold_lifeline\nhold_lifeline()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, LIFELINE: "1"}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdin.close()
    assert process.wait(timeout=10) == ORPHANED
    process.stdout.close()


def test_a_child_that_hangs_writes_where_and_is_killed(tmp_path: Path) -> None:
    """Its main loop does not run: not even Python's own signal handlers would."""
    code = (
        "from astraflow.run.child import hold_lifeline\nhold_lifeline()\n"
        "def waits_for_nobody():\n    print('up', flush=True)\n    while True: pass\nwaits_for_nobody()"
    )

    async def scenario() -> None:
        log = tmp_path / "x.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=-1, stdout=-1, stderr=file, start_new_session=True
            )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        spec = ChildSpec(name="x", arguments=(), environment={}, log=log)
        child = Child(spec, process, 0.0)
        await asyncio.wait_for(child.end_hung(), 10.0)
        assert await asyncio.wait_for(child.wait(), 10.0) == -signal.SIGKILL
        assert "in waits_for_nobody" in log.read_text()

    asyncio.run(scenario())


def test_a_child_is_told_and_then_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = ChildSpec(name="x", arguments=("--version",), environment={"SECRET": "s"}, log=tmp_path / "x.log")
        assert "SECRET" not in repr(spec)
        child = await Child.start(spec)
        assert await child.wait() == 0
        assert child.last_words().startswith("astraflow ")
        wrong = ChildSpec(name="y", arguments=("nothing",), environment={}, log=tmp_path / "y.log")
        child = await Child.start(wrong)
        assert await child.end(grace_s=10.0) in (2, -signal.SIGTERM)

    asyncio.run(scenario())


def test_last_words_are_the_sentence_if_there_is_one(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("noise\nastraflow: port 3 is in use\nmore noise\n")
    spec = ChildSpec(name="x", arguments=(), environment={}, log=log)
    child = Child(spec, None, 0.0)  # type: ignore[arg-type]
    assert child.last_words() == "port 3 is in use"
    log.write_text("a\n\nb\n")
    assert child.last_words() == "a\nb"
    assert read_tail(tmp_path / "none.log") == []


def test_last_words_are_not_those_of_an_earlier_process(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("astraflow: port 3 is in use\n")
    spec = ChildSpec(name="x", arguments=(), environment={}, log=log)
    child = Child(spec, None, 0.0, log_from=log.stat().st_size)  # type: ignore[arg-type]
    assert (child.sentence, child.last_words()) == (None, f"nothing in {log}")
    with log.open("a") as file:
        file.write("noise\n")
    assert (child.sentence, child.last_words()) == (None, "noise")


def test_a_child_knows_where_its_log_begins(tmp_path: Path) -> None:
    async def last_words() -> str:
        spec = ChildSpec(name="x", arguments=("--version",), environment={}, log=log)
        child = await Child.start(spec)
        await child.wait()
        assert child.sentence is None
        return child.last_words()

    log = tmp_path / "x.log"
    log.write_text("astraflow: port 3 is in use\n")
    assert asyncio.run(last_words()).startswith("astraflow ")


def test_config_is_json_for_people(tmp_path: Path) -> None:
    write_json(tmp_path / "c.json", {"b": 1, "a": [1]})
    assert json.loads((tmp_path / "c.json").read_text()) == {"b": 1, "a": [1]}
