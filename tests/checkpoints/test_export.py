"""Exports are bitwise what was imported, whatever the mesh, with a config.json that others understand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity import cases
from tests.parity.cases import Case, write_checkpoint

import shardwise
from shardwise.api import Model
from shardwise.checkpoints.export import export, hf_tensors
from shardwise.errors import CheckpointError
from shardwise.families import config_from_hf

# head_dim · heads is not hidden_size, so that swapped dims show; mlp 90 and vocab 101 are divided by little.
CASE = cases.BY_NAME["both_biases_tied"]
UNEVEN = replace(
    CASE,
    config=CASE.config
    | {"hidden_size": 48, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10}
    | {"tie_word_embeddings": False},
)
MQA = replace(UNEVEN, config=UNEVEN.config | {"num_attention_heads": 5, "num_key_value_heads": 1})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    root = tmp_path_factory.mktemp("export")
    folders: dict[str, Path] = {}

    def folder(case: Case) -> Path:
        key = json.dumps(dict(case.config))
        if key not in folders:
            folders[key] = write_checkpoint(case, root / str(len(folders)))
        return folders[key]

    return folder


def load(folder: Path, mesh: str = "1,1,1", **options: object) -> Model:
    count = math.prod(map(int, mesh.split(",")))
    return shardwise.load(folder, mesh=mesh, devices=jax.devices()[:count], **options)


def assert_bitwise(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("case", "mesh", "stacked"),
    [
        (UNEVEN, "1,1,1", False),
        (UNEVEN, "1,2,2", True),
        (UNEVEN, "1,5,1", True),  # fsdp 5 divides little: stored padded
        (UNEVEN, "2,2,2", False),
        (UNEVEN, "1,1,4", True),
        (MQA, "1,1,4", False),  # kv heads held once, query heads in 4 slots of 2
        (MQA, "1,1,8", True),
        (CASE, "1,1,3", False),
    ],
)
def test_every_tensor_comes_back_bitwise(
    folder_of: Callable[[Case], Path], case: Case, mesh: str, stacked: bool
) -> None:
    folder = folder_of(case)
    model = load(folder, mesh, stacked=stacked)
    tensors = dict(hf_tensors(model.plan, model.mesh, model.params))
    assert_bitwise(tensors, load_file(folder / "model.safetensors"))


def test_overrides_leave_exports_as_they_are(folder_of: Callable[[Case], Path]) -> None:
    folder = folder_of(UNEVEN)
    overrides = ("q_proj/kernel=tp,fsdp,None,None", "down_proj/kernel=None,None")
    model = load(folder, "1,3,2", stacked=True, overrides=overrides)
    assert_bitwise(
        dict(hf_tensors(model.plan, model.mesh, model.params)), load_file(folder / "model.safetensors")
    )


def test_the_written_folder_is_the_model_again(folder_of: Callable[[Case], Path], tmp_path: Path) -> None:
    source = folder_of(UNEVEN)
    load(source, "1,1,4", stacked=True).export(tmp_path / "out")
    assert_bitwise(load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config_from_hf(config) == config_from_hf(UNEVEN.config)
    # What we do not translate is kept from the source.
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    again = load(tmp_path / "out", "1,2,1")
    assert_bitwise(
        dict(hf_tensors(again.plan, again.mesh, again.params)), load_file(source / "model.safetensors")
    )


def test_bfloat16_files_stay_bfloat16_and_the_config_says_so(tmp_path: Path) -> None:
    source = write_checkpoint(UNEVEN, tmp_path / "narrow")
    narrow = {n: w.astype(ml_dtypes.bfloat16) for n, w in load_file(source / "model.safetensors").items()}
    save_file(narrow, source / "model.safetensors")
    load(source, "1,1,2").export(tmp_path / "out")
    assert_bitwise(load_file(tmp_path / "out/model.safetensors"), narrow)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_files_of_mixed_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    source = write_checkpoint(UNEVEN, tmp_path / "mixed")
    narrow = (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
    )
    file = load_file(source / "model.safetensors")
    mixed = {n: w.astype(ml_dtypes.bfloat16) if n in narrow else w for n, w in file.items()}
    save_file(mixed, source / "model.safetensors")
    apart = load(source, "1,1,2")
    assert_bitwise(dict(hf_tensors(apart.plan, apart.mesh, apart.params)), mixed)
    # One array for all layers has one dtype, the widest, in which every value is kept.
    stacked = load(source, "1,1,2", stacked=True)
    for name, array in hf_tensors(stacked.plan, stacked.mesh, stacked.params):
        assert array.dtype in (mixed[name].dtype, np.float32)
        np.testing.assert_array_equal(array.astype(np.float32), mixed[name].astype(np.float32))


def test_a_dtype_can_be_asked_for(folder_of: Callable[[Case], Path], tmp_path: Path) -> None:
    source = folder_of(UNEVEN)
    load(source).export(tmp_path / "out", "bfloat16")
    want = {n: w.astype(ml_dtypes.bfloat16) for n, w in load_file(source / "model.safetensors").items()}
    assert_bitwise(load_file(tmp_path / "out/model.safetensors"), want)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_c105_rotary_settings_are_written_in_both_spellings(
    folder_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    scaling = {"rope_type": "llama3", **cases.LLAMA3_SCALING}
    llama3 = replace(UNEVEN, config=UNEVEN.config | {"rope_theta": 500000, "rope_scaling": scaling})
    linear = replace(UNEVEN, config=UNEVEN.config | {"rope_scaling": {"type": "linear", "factor": 2}})
    for case, want in ((llama3, scaling), (linear, {"rope_type": "linear", "factor": 2})):
        out = tmp_path / want["rope_type"]
        load(folder_of(case)).export(out)
        config = json.loads((out / "config.json").read_text())
        assert config["rope_theta"] == case.config["rope_theta"]
        assert config["rope_scaling"] == want
        assert config["rope_parameters"] == {"rope_theta": config["rope_theta"], **want}


def test_an_existing_folder_is_never_overwritten(folder_of: Callable[[Case], Path], tmp_path: Path) -> None:
    model = load(folder_of(CASE))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out"):
        export(tmp_path / "out", model.plan, model.mesh, model.params)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_broken_tokenizer_is_an_error_and_an_absent_one_stays_absent(
    folder_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder_of(CASE), source)
    load(source).export(tmp_path / "without")
    assert not list((tmp_path / "without").glob("tokenizer*"))
    (source / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load(source).export(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
