"""Opening Hugging Face folders: views without copies, and every broken folder refused before any is read."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from shardwise.checkpoints.reader import open_checkpoint
from shardwise.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 40}


def _folder(path: Path, config=CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _tensors(count=4):
    rng = np.random.default_rng(0)
    return {f"t{i}": rng.standard_normal((6, 5)).astype(np.float32) for i in range(count)}


def _sharded(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    folder, tensors = _folder(path), _tensors()
    names = {"t0": "a.safetensors", "t1": "a.safetensors", "t2": "b.safetensors", "t3": "b.safetensors"}
    for file in sorted(set(names.values())):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    _write_index(folder, names)
    return folder, tensors


def _write_index(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _raw_file(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def _is_mapped(array: np.ndarray) -> bool:
    base = array
    while getattr(base, "base", None) is not None:
        base = base.base
    return isinstance(base, mmap.mmap)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]
)
def test_rows_are_read_only_views_of_the_mapped_file(tmp_path, dtype):
    value = np.random.default_rng(0).standard_normal((7, 3)).astype(dtype)
    save_file({"w": value}, _folder(tmp_path) / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    info = checkpoint.reader.tensors()["w"]
    assert (info.shape, info.dtype, info.file) == ((7, 3), dtype, str(tmp_path / "model.safetensors"))
    rows = checkpoint.reader.rows("w", 2, 6)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, value[2:6])
    assert _is_mapped(rows)
    assert not rows.flags.writeable


def test_unaligned_tensors_are_read_right(tmp_path):
    value = np.arange(6, dtype=np.float32).reshape(3, 2)
    header = '{"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}'
    header += " " * ((1 - 8 - len(header)) % 8)  # the data start at a byte that is 1 modulo 8
    _raw_file(_folder(tmp_path) / "model.safetensors", header, value.tobytes())
    rows = open_checkpoint(tmp_path).reader.rows("w", 1, 3)
    np.testing.assert_array_equal(rows, value[1:])
    assert rows.flags.aligned


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status (Linux)")
def test_reading_all_rows_takes_no_memory_of_its_own(tmp_path):
    size = 64 << 20
    save_file({"w": np.ones((size // 4096, 1024), np.float32)}, _folder(tmp_path) / "model.safetensors")

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    before = anonymous()
    checkpoint = open_checkpoint(tmp_path)
    rows = checkpoint.reader.rows("w", 0, size // 4096)
    assert rows.max() == 1.0  # touches every page
    # A copy would add 64 MiB; the interpreter's own growth in these lines is far below a quarter of that.
    assert anonymous() - before < size // 4


def test_a_sharded_folder_gives_all_tensors(tmp_path):
    folder, tensors = _sharded(tmp_path)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors"
    assert checkpoint.hf_config == CONFIG
    assert checkpoint.generation_config is None
    assert set(checkpoint.reader.tensors()) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.reader.rows(name, 0, 6), value)


def test_a_missing_shard_is_named(tmp_path):
    folder, _ = _sharded(tmp_path)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        open_checkpoint(folder)


def test_a_shard_cut_anywhere_is_named(tmp_path):
    folder, _ = _sharded(tmp_path)
    content = (folder / "b.safetensors").read_bytes()
    for length in range(len(content)):
        (folder / "b.safetensors").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"b\.safetensors"):
            open_checkpoint(folder)


def test_a_stale_shard_is_not_used(tmp_path):
    folder, tensors = _sharded(tmp_path)
    for stale in ("c.safetensors", "model.safetensors"):
        save_file({"t0": np.zeros((6, 5), np.float32), "old": np.zeros(3)}, folder / stale)
    (folder / "d.safetensors").write_bytes(b"broken")
    reader = open_checkpoint(folder).reader
    assert set(reader.tensors()) == set(tensors)
    np.testing.assert_array_equal(reader.rows("t0", 0, 6), tensors["t0"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"t1": "b.safetensors"}, "'t1' is in"),
        ({"t9": "b.safetensors"}, r"b\.safetensors.*'t9'"),
        ({"t3": None}, r"b\.safetensors.*'t3' is not in the index"),
        ({"t0": "../a.safetensors"}, r"'\.\./a\.safetensors'"),
        ({"t0": 3}, "'t0' is said to be in 3"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, change, named):
    folder, _ = _sharded(tmp_path)
    names = {"t0": "a.safetensors", "t1": "a.safetensors", "t2": "b.safetensors", "t3": "b.safetensors"}
    _write_index(folder, {key: value for key, value in (names | change).items() if value is not None})
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder, tensors = _sharded(tmp_path)
    save_file({name: tensors[name] for name in ("t0", "t2", "t3")}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"'t0' is in .*a\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    folder, _ = _sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(folder)


_ENTRY = '"dtype":"F32","shape":[2]'
_CORRUPT = {
    "no JSON": "{not json",
    "no object": "[1]",
    "no offsets": '{"w":{"dtype":"F32","shape":[2]}}',
    "negative offset": f'{{"w":{{{_ENTRY},"data_offsets":[-8,0]}}}}',
    "beyond the end": f'{{"w":{{{_ENTRY},"data_offsets":[80,88]}}}}',
    "overlap": f'{{"v":{{{_ENTRY},"data_offsets":[0,8]}},"w":{{{_ENTRY},"data_offsets":[4,12]}}}}',
    "size of another shape": '{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "hole": f'{{"v":{{{_ENTRY},"data_offsets":[0,8]}},"w":{{{_ENTRY},"data_offsets":[12,20]}}}}',
    "dtype of another type": '{"w":{"dtype":3,"shape":[2],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("header", _CORRUPT.values(), ids=_CORRUPT.keys())
def test_a_corrupt_header_is_refused_with_the_file(tmp_path, header):
    _raw_file(_folder(tmp_path) / "model.safetensors", header, bytes(20))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_twice_in_one_header_is_refused(tmp_path):
    entry = f'"w":{{{_ENTRY},"data_offsets":[0,8]}}'
    _raw_file(_folder(tmp_path) / "model.safetensors", f"{{{entry},{entry}}}", bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'w' occurs twice"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_float8_is_refused_by_name(tmp_path, dtype):
    header = f'{{"w":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,8]}}}}'
    _raw_file(_folder(tmp_path) / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=rf"'w'.*{dtype}"):
        open_checkpoint(tmp_path)


def test_a_mistyped_path_is_not_found_and_the_near_one_offered(tmp_path):
    _folder(tmp_path / "smollm2")
    with pytest.raises(CheckpointError, match=r"folder or file not found: .*smolm2.*did you mean .*smollm2"):
        open_checkpoint(tmp_path / "smolm2")
    with pytest.raises(CheckpointError, match="folder or file not found"):
        open_checkpoint("no/such/folder")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "x.pth"]
)
def test_pickle_weights_are_refused_with_the_way_out(tmp_path, name):
    (_folder(tmp_path) / name).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=rf"{name}.*can run any code.*safetensors"):
            open_checkpoint(path)


def test_safetensors_beside_pickles_are_used(tmp_path):
    (_folder(tmp_path) / "pytorch_model.bin").write_bytes(b"\x80\x04")
    save_file(_tensors(1), tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"


@pytest.mark.parametrize("where", [lambda c: c, lambda c: {"text_config": c}])
def test_quantised_weights_are_refused_by_method(tmp_path, where):
    save_file(_tensors(1), tmp_path / "model.safetensors")
    _folder(tmp_path, where({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match="gptq"):
        open_checkpoint(tmp_path)


def test_a_config_that_is_no_json_gives_file_line_and_column(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "a": 1,\n  b\n}')
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CheckpointError, match=r"config\.json: line 3, column 3"):
            open_checkpoint(path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="list"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="UTF-8"):
        open_checkpoint(tmp_path)


def test_a_bare_config_opens_without_weights(tmp_path):
    _folder(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.format, checkpoint.hf_config, checkpoint.reader) == ("config", CONFIG, None)


def test_the_generation_config_is_read(tmp_path):
    _folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    save_file(_tensors(1), tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [2, 7]}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([], "no model"),
        (["model.safetensors"], "no config.json"),
        (["config.json", "adapter_model.safetensors"], "adapter_model.safetensors"),
        (["config.json", "tf_model.h5"], "tf_model.h5"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path, files, named):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(tmp_path)


def test_a_weight_file_alone_points_to_its_folder(tmp_path):
    save_file(_tensors(1), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"name its folder.*{os.path.basename(tmp_path)}"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_an_unknown_tensor_name_is_refused(tmp_path):
    save_file(_tensors(1), _folder(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match="'t9'"):
        open_checkpoint(tmp_path).reader.rows("t9", 0, 1)
