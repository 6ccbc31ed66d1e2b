"""`shardwise finetune` from start to end: what it writes, and that stopping and resuming changes nothing.

Not here: mistakes in options and data (test_job_mistakes.py) and odd batches (test_odd_batches.py).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import SENTENCES, VOCAB, read_metrics, write_jsonl, write_llama

import shardwise
from shardwise.checkpoints import native
from shardwise.data.packing import PackedDataset
from shardwise.data.tokens import tokenize_documents
from shardwise.training import jobs

from .conftest import COMMON, Site

PEAK, WARMUP, STEPS = np.float32(COMMON["learning-rate"]), COMMON["warmup-steps"], COMMON["steps"]


@pytest.fixture(scope="module")
def straight(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Ten steps without interruption, with held-out loss and checkpoints, as run `straight`."""
    site = Site(*tiny, tmp_path_factory.mktemp("straight"))
    code = site.finetune(
        "straight", eval_data=site.data, eval_every=4, checkpoint_dir=site.folder / "checkpoints"
    )
    assert code == 0
    return site


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loop end as Ctrl-C would, just after it has reported `step`."""
    report = jobs.Reporter.step

    def reported(self: jobs.Reporter, number: int, *args: Any) -> None:
        report(self, number, *args)
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs.Reporter, "step", reported)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_the_written_folder_opens_and_computes_with_the_trained_weights(straight: Site) -> None:
    out = straight.folder / "straight"
    tokens = np.arange(8)[None] + 40
    after = shardwise.load(out, mesh="1,1,1", devices=jax.devices()[:1])
    before = shardwise.load(straight.model, mesh="1,1,1", devices=jax.devices()[:1])
    assert after.config == before.config
    assert np.abs(after.logits(tokens) - before.logits(tokens)).max() > 0.1
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()
    assert after.tokenizer.chat_template == before.tokenizer.chat_template


def test_the_written_weights_are_those_of_the_last_checkpoint(straight: Site) -> None:
    found = native.find_newest(straight.folder / "checkpoints", pytest.fail)
    assert found.step == STEPS
    plan = shardwise.plan(straight.model, found.meta["mesh"])
    import orbax.checkpoint as ocp

    # Read the other way round, without our restore: as stored, trimmed to the true shape.
    stored = ocp.PyTreeCheckpointer().restore(found.path / "arrays")
    written = tensors(straight.folder / "straight")
    for path, name in [
        ("final_norm/scale", "model.norm.weight"),
        ("embed/table", "model.embed_tokens.weight"),
    ]:
        array = plan.padding.trim(np.asarray(stored["params." + path.replace("/", ".")]), plan[path].axes)
        assert array.tobytes() == written[name].tobytes()


def test_there_is_one_complete_record_for_each_step(straight: Site) -> None:
    records = straight.steps("straight")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record.keys() == {
            "step", "loss", "trained_tokens", "grad_norm", "learning_rate", "tokens_per_second", "mfu",
            "seconds",
        }  # fmt: skip
        assert 1 < record["loss"] < 10
        assert 0 < record["trained_tokens"] <= 8 * 16
        assert all(math.isfinite(value) and value > 0 for value in record.values())
    assert records[-1]["loss"] < records[0]["loss"] - 0.5


def test_the_learning_rate_warms_up_and_falls_along_a_cosine(straight: Site) -> None:
    rates = [record["learning_rate"] for record in straight.steps("straight")]
    rise = [float(PEAK) * step / WARMUP for step in range(1, WARMUP + 1)]
    fall = [
        float(PEAK) * 0.5 * (1 + math.cos(math.pi * step / (STEPS - WARMUP)))
        for step in range(STEPS - WARMUP)
    ]
    # float32: one cosine (2 units in the last place near its zero) and three products.
    np.testing.assert_allclose(rates, rise + fall, rtol=1e-6, atol=float(PEAK) * 1e-6)


def test_held_out_loss_is_measured_at_the_start_as_asked_and_at_the_end(straight: Site) -> None:
    records = [r for r in read_metrics(straight.folder / "straight.jsonl") if "eval_nll" in r]
    assert [record["step"] for record in records] == [0, 4, 8, 10]
    assert {record["eval_tokens"] for record in records} == {477 - 2 * len(SENTENCES)}  # no BOS, no EOS
    assert all(r["eval_perplexity"] == math.exp(r["eval_nll"]) for r in records)
    losses = [record["eval_nll"] for record in records]
    assert losses[-1] < losses[0] - 0.5


def test_interrupted_and_resumed_is_bitwise_the_uninterrupted_run(
    straight: Site, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = {"checkpoint_dir": site.folder / "c", "checkpoint_every": 5}
    with monkeypatch.context() as patch:
        stop_after(patch, 7)  # so that steps 6 and 7 are done twice
        assert site.finetune("run", **checkpoints) == 130
    assert not (site.folder / "run").exists()
    assert [record["step"] for record in site.steps("run")] == [1, 2, 3, 4, 5, 6, 7]
    capsys.readouterr()
    assert site.finetune("run", "--resume", **checkpoints) == 0
    assert "resuming from" in capsys.readouterr().out
    for ours, theirs in zip(site.steps("run"), straight.steps("straight"), strict=True):
        for key in ("step", "learning_rate", "loss", "grad_norm", "trained_tokens"):
            assert ours[key] == theirs[key], (ours, theirs)
    resumed, whole = tensors(site.folder / "run"), tensors(straight.folder / "straight")
    assert all(resumed[name].tobytes() == array.tobytes() for name, array in whole.items())


@pytest.fixture(scope="module")
def stopped(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A run that was interrupted after step 6, with a checkpoint of step 5 in `c`."""
    site = Site(*tiny, tmp_path_factory.mktemp("stopped"))
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 6)
        assert site.finetune("stopped", checkpoint_dir=site.folder / "c", checkpoint_every=5) == 130
    return site


def test_resumed_on_another_mesh_the_losses_are_those_of_the_first(
    straight: Site, stopped: Site, site: Site
) -> None:
    folder = shutil.copytree(stopped.folder / "c", site.folder / "c")
    assert site.finetune("run", "--resume", checkpoint_dir=folder, mesh="2,2,2") == 0
    ours, theirs = site.steps("run"), straight.steps("straight")[5:]
    assert [record["step"] for record in ours] == [6, 7, 8, 9, 10]
    assert [r["learning_rate"] for r in ours] == [r["learning_rate"] for r in theirs]
    # Another order of summation over at most 128 rows and 290 ids: 2⁻²⁴ · √290 ≈ 1e-6 of the loss at first.
    # Adam divides by the root of squares: tiny gradients of another sign move weights by twice the rate.
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-4)
    np.testing.assert_allclose(ours[0]["loss"], theirs[0]["loss"], rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"seed": 1}, "--seed was 0, is 1"),
        ({"length": 8}, "--length was 16, is 8"),
        ({"global_batch": 16}, "--global-batch was 8, is 16"),
        ({"learning_rate": 2e-2}, "--learning-rate was 0.01, is 0.02"),
        ({"steps": 20}, "--steps or --epochs was 10, is 20"),
        ({"z_loss": 1e-4}, "--z-loss was 0.0, is 0.0001"),
        ({"weight_decay": 0.1}, "--weight-decay was 0.0, is 0.1"),
        ({"param_dtype": "bfloat16"}, "--param-dtype was 'float32', is 'bfloat16'"),
        ({"compute_dtype": "bfloat16"}, "--compute-dtype was 'float32', is 'bfloat16'"),
    ],
)
def test_resuming_with_other_options_is_refused_by_name(
    stopped: Site, site: Site, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], option: str
) -> None:
    assert site.finetune("run", "--resume", checkpoint_dir=stopped.folder / "c", **changes) == 2
    error = capsys.readouterr().err
    assert option in error
    assert "use the saved run's options, or another --checkpoint-dir" in error
    assert not (site.folder / "run.jsonl").exists()


def test_resuming_with_other_data_or_another_model_is_refused(
    stopped: Site, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = stopped.folder / "c"
    other = write_jsonl(site.folder / "other.jsonl", SENTENCES[::-1])
    assert site.finetune("run", "--resume", checkpoint_dir=checkpoints, data=other) == 2
    assert "--data holds other text" in capsys.readouterr().err
    model = write_llama(site.folder / "model", rms_norm_eps=1e-6)
    assert site.finetune("run", "--resume", checkpoint_dir=checkpoints, model=model) == 2
    assert "MODEL: norm_eps was 1e-05, is 1e-06" in capsys.readouterr().err


def test_a_run_that_ended_before_its_export_is_resumed_by_exporting(
    straight: Site, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.finetune("again", "--resume", checkpoint_dir=straight.folder / "checkpoints") == 0
    assert "all 10 steps are done already" in capsys.readouterr().out
    ours, theirs = tensors(site.folder / "again"), tensors(straight.folder / "straight")
    assert all(ours[name].tobytes() == array.tobytes() for name, array in theirs.items())


def test_a_new_run_does_not_mix_its_checkpoints_or_metrics_with_those_of_an_earlier_one(
    straight: Site, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.finetune("run", checkpoint_dir=straight.folder / "checkpoints") == 2
    assert "holds step_00000010 of an earlier run; add --resume" in capsys.readouterr().err
    assert site.finetune("run", metrics=straight.folder / "straight.jsonl") == 2
    assert "--metrics: " in (error := capsys.readouterr().err)
    assert "exists already" in error


def test_resume_names_the_checkpoints_that_it_passes_over(
    stopped: Site, site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(stopped.folder / "c", site.folder / "c"))
    shutil.copytree(folder / "step_00000005", folder / "step_00000006")
    (folder / "step_00000006" / "meta.json").unlink()
    stop_after(monkeypatch, 6)
    assert site.finetune("run", "--resume", checkpoint_dir=folder) == 130
    out = capsys.readouterr().out
    assert "skipped checkpoint step_00000006: meta.json is missing" in out
    assert f"resuming from {folder / 'step_00000005'} (step 5, saved on mesh dp:1,fsdp:4,tp:2)" in out


def test_epochs_see_every_token_that_many_times(site: Site) -> None:
    # 11 documents make 25 rows; three epochs are 75 rows, so that the tenth batch of 8 is half empty.
    data = write_jsonl(site.folder / "eleven.jsonl", SENTENCES[:11])
    assert site.finetune("run", data=data, steps=None, epochs=3) == 0
    tokenizer = shardwise.load(site.model, mesh="1,1,1", devices=jax.devices()[:1]).tokenizer
    store = tokenize_documents(tokenizer, SENTENCES[:11], vocab_size=VOCAB)
    wanted = 3 * PackedDataset(store, 16, seed=0, epochs=3).targets_per_epoch
    records = site.steps("run")
    assert len(records) == 10
    assert sum(record["trained_tokens"] for record in records) == wanted
    assert records[-1]["trained_tokens"] < 60


def test_metrics_are_lines_of_plain_json(straight: Site) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    for line in (straight.folder / "straight.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_pretraining_starts_from_chance_learns_and_writes_a_model_of_its_own(site: Site) -> None:
    assert site.pretrain("new") == 0
    losses = [record["loss"] for record in site.steps("new")]
    # Fresh parameters are drawn with deviation 0.02: all ids are about equally likely.
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.05)
    assert losses[-1] < losses[0] - 0.3
    ours, theirs = tensors(site.folder / "new"), tensors(site.model)
    assert {name: array.shape for name, array in ours.items()} == {n: a.shape for n, a in theirs.items()}
    assert np.abs(ours["lm_head.weight"]).max() < 0.2 < np.abs(theirs["lm_head.weight"]).max()
    assert shardwise.load(site.folder / "new", mesh="1,1,8").tokenizer.eos_token == "</s>"


def test_another_seed_draws_another_model(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 1)
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert site.pretrain(name, "--seed", seed) == 130
    first, same, other = (site.steps(name)[0]["grad_norm"] for name in "abc")
    assert first == same != other
