"""The digest depends on names, dtypes, shapes and bits, and on nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from astraflow.errors import ConfigError, WeightsRefused
from astraflow.weights.digest import combine, digest_files, digest_tensor, digest_tensors, form_of_files, quick_digest
from astraflow.weights.manifest import manifest_of_folder
from astraflow.weights.tensors import Tensor, of_array, read_tensors
from tests.unit.weights.files import model


def test_definition_written_out() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    line = f"b\0F32\x002,3\0{hashlib.sha256(array.tobytes()).hexdigest()}\n".encode()
    scalar = f"a\0I64\0\0{hashlib.sha256(np.int64(7).tobytes()).hexdigest()}\n".encode()
    expected = hashlib.sha256(b"astraflow weights 1\n" + scalar + line).hexdigest()
    assert digest_tensors({"b": array, "a": np.array(7, np.int64)}) == expected


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6),
        hnp.arrays(np.int16, hnp.array_shapes(max_dims=3, max_side=4)),
        min_size=1,
    ),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_every_bit_does(tensors: dict[str, Any], rng: Any) -> None:
    digest = digest_tensors(tensors)
    names = list(tensors)
    rng.shuffle(names)
    assert digest_tensors({name: tensors[name] for name in names}) == digest
    name = names[0]
    changed = tensors[name].copy()
    changed.reshape(-1)[-1] ^= 1
    assert digest_tensors({**tensors, name: changed}) != digest
    assert digest_tensors({**tensors, name: tensors[name][None]}) != digest
    assert digest_tensors({**tensors, name: tensors[name].view(np.uint16)}) != digest
    assert digest_tensors({**{n: tensors[n] for n in names[1:]}, name + "x": tensors[name]}) != digest


def test_files_and_memory_agree_however_sharded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"t{n}": rng.normal(size=(5, n + 1)).astype(np.float16) for n in range(6)} | {
        "e": np.zeros((0, 4), np.uint8)
    }
    save_file(tensors, str(tmp_path / "all.safetensors"), metadata={"format": "pt"})
    save_file({k: tensors[k] for k in ("t0", "t3", "e")}, str(tmp_path / "a.safetensors"))
    save_file({k: tensors[k] for k in ("t1", "t2", "t4", "t5")}, str(tmp_path / "b.safetensors"))
    expected = digest_tensors(tensors)
    assert digest_files([tmp_path / "all.safetensors"]) == expected
    assert digest_files([tmp_path / "b.safetensors", tmp_path / "a.safetensors"]) == expected
    with pytest.raises(WeightsRefused, match="twice"):
        digest_files([tmp_path / "all.safetensors", tmp_path / "a.safetensors"])


def test_bfloat16_as_torch_holds_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    weights = {"w": torch.randn(3, 4).to(torch.bfloat16), "s": torch.tensor(1.5, dtype=torch.bfloat16)}
    save_torch(weights, str(tmp_path / "m.safetensors"))
    bits = [of_array(n, t.view(torch.int16).numpy().view(np.uint16), dtype="BF16") for n, t in weights.items()]
    assert digest_tensors(bits) == digest_files([tmp_path / "m.safetensors"])
    found = {tensor.name: tensor for tensor in read_tensors(tmp_path / "m.safetensors")}
    assert found["w"].dtype == "BF16" and found["w"].shape == (3, 4) and not found["w"].data.flags.writeable


def test_quick_digest_is_another_digest_of_the_same_thing() -> None:
    one = [of_array("a", np.arange(4, dtype=np.float32))]
    two = [of_array("a", np.arange(4, dtype=np.float32) + 1)]
    assert quick_digest(one) == quick_digest(one) != quick_digest(two)
    assert quick_digest(one) != digest_tensors(one)


def test_parts_can_be_made_anywhere() -> None:
    tensors = [of_array(name, np.full(3, n, np.float64)) for n, name in enumerate("cab")]
    assert combine(map(digest_tensor, reversed(tensors))) == digest_tensors(tensors)


@pytest.mark.parametrize("name", ["a\0b", "a\nb"])
def test_names_cannot_forge_lines(name: str) -> None:
    with pytest.raises(WeightsRefused):
        digest_tensors([Tensor(name, "U8", (1,), np.zeros(1, np.uint8))])


@pytest.mark.parametrize("array", [np.zeros(2, ">f4"), np.zeros(2, np.complex64), np.zeros(2, "U3")], ids=str)
def test_other_dtypes_are_refused(array: Any) -> None:
    with pytest.raises(WeightsRefused):
        of_array("a", array)
    with pytest.raises(WeightsRefused):
        of_array("a", np.zeros(2, np.float32), dtype="BF16")


def test_manifest_of_folder(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", shards=3)
    found = manifest_of_folder(folder, "solver")
    assert (found.policy, found.version, found.serial, found.base_digest) == ("solver", 0, 0, None)
    assert [f.name for f in found.files] == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    for file in found.files:
        data = (folder / file.name).read_bytes()
        assert (file.sha256, file.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    save_file({"lora": np.zeros(1, np.float32)}, str(folder / "adapter_model.safetensors"))
    assert manifest_of_folder(folder, "solver") == found


def test_missing_folder_and_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        manifest_of_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no"):
        manifest_of_folder(tmp_path)


def test_the_form_is_of_names_and_shapes_alone(tmp_path: Path) -> None:
    def saved(name: str, **tensors: Any) -> Path:
        save_file(tensors, str(tmp_path / name))
        return tmp_path / name

    a, b = np.zeros((2, 3), np.float32), np.ones(4, np.float32)
    whole = form_of_files([saved("whole", a=a, b=b)])
    assert whole == hashlib.sha256(b"a\x002,3\nb\x004\n").hexdigest()
    assert form_of_files([saved("second", b=b + 1), saved("first", a=a.astype(np.float16))]) == whole
    assert form_of_files([saved("reshaped", a=a.T.copy(), b=b)]) != whole
    assert form_of_files([saved("renamed", a=a, c=b)]) != whole
