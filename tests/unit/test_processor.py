"""Half precision is chosen only where the processor multiplies it: elsewhere it costs up to ten times as much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astraflow.engines import folder as engine_folder
from astraflow.engines.settings import EngineSettings
from astraflow.processor import flags_of, multiplies
from astraflow.run.tiny_model import TinyModel

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 fma avx avx2\n"
ZEN_4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
SAPPHIRE = "flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile avx512_fp16\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimdhp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "bfloat16", "float16"),
    [
        (ZEN_3, False, False),
        (ZEN_4, True, False),
        (SAPPHIRE, True, True),
        (GRAVITON, True, True),
        ("", False, False),
        ("flags", False, False),
        ("flags: avx512_bf16x", False, False),
    ],
)
def test_what_processors_multiply(cpuinfo: str, bfloat16: bool, float16: bool) -> None:
    flags = flags_of(cpuinfo)
    assert (multiplies("bfloat16", flags), multiplies("float16", flags)) == (bfloat16, float16)
    assert multiplies("float32", flags)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hardware", [True, False])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_the_engine_takes_the_folders_dtype_where_it_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, hardware: bool, asked: str
) -> None:
    monkeypatch.setattr(engine_folder, "multiplies", lambda dtype: hardware or dtype == "float32")
    folder = TinyModel(hidden=32, layers=1, heads=2, kv_heads=2, intermediate=64).build(tmp_path / "model")
    config = folder / "config.json"
    text = config.read_text()
    assert '"float32"' in text
    config.write_text(text.replace('"float32"', f'"{stored}"'))
    found = engine_folder.open_folder(folder, EngineSettings(dtype=asked, device="cpu")).dtype
    expected = asked if asked != "auto" else stored if hardware else "float32"
    assert found == getattr(torch, expected)
