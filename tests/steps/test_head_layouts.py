"""Each layout of the head, tied and untied, with and without bias, equals a float64 reference on every mesh.

Not here: whole models (test_head_models.py), and sampling itself (test_sampling.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.head_layouts import LAYOUTS, Case, largest_array

from shardwise.models.head import Columns, Head, head_logits
from shardwise.models.parameters import plan_model
from shardwise.models.vocabulary import VocabMatrix, look_up
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import partition_spec
from shardwise.partition.rows import put_rows
from shardwise.partition.rules import Override
from shardwise.steps import loss, sampling
from shardwise.steps.loss import cross_entropy
from shardwise.steps.sampling import SamplingParams
from shardwise.steps.score import token_scores

Z_LOSS, TOP = 0.02, 3
MESHES = [(1, 1, 2), (1, 1, 3), (1, 1, 5), (1, 1, 6), (1, 1, 7), (1, 1, 8), (1, 2, 2), (2, 2, 2)]


def make_head(place: Placement, case: Case, weight: jax.Array, bias: jax.Array | None) -> Head:
    if bias is None:
        return Head.of(place, case.path, weight)
    return Head.of(place, case.path, weight, "lm_head/bias", bias)


def put_params(place: Placement, case: Case, given: dict[str, np.ndarray]) -> list[jax.Array]:
    """Weight, and bias where there is one, padded and cut as the plan says."""
    out = []
    for path, name in ((case.path, "weight"), ("lm_head/bias", "bias")):
        if path in place.plan:
            d = place.plan[path]
            padded = place.plan.padding.pad(given[name], d.axes, d.shape)
            out.append(jax.device_put(padded, place.plan.sharding(place.mesh, path)))
    return out


def computed(place: Placement, case: Case, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the reference gives, computed on the mesh, in true shapes; gradients must be zero in padding."""
    top = min(TOP, case.vocab)

    @jax.jit
    def everything(params: list[jax.Array], rows: dict[str, jax.Array]) -> dict[str, Any]:
        def enter(params: list[jax.Array], hidden: jax.Array) -> tuple[Head, jax.Array]:
            if case.tied:
                hidden = hidden + look_up(
                    place, VocabMatrix.of(place, case.path, params[0]), rows["tokens"], case.embed
                )
            return make_head(place, case, params[0], params[1] if case.bias else None), hidden

        def total(params: list[jax.Array], hidden: jax.Array) -> jax.Array:
            head, x = enter(params, hidden)
            return cross_entropy(place, x, head, rows["targets"], rows["weights"], Z_LOSS)

        head, x = enter(params, rows["hidden"])
        value, (d_params, d_hidden) = jax.value_and_grad(total, argnums=(0, 1))(params, rows["hidden"])
        out = token_scores(place, x, head, rows["targets"], top)
        out |= {"logits": head_logits(place, head, x), "loss": value, "d_hidden": d_hidden}
        return out | {"loss_alone": total(params, rows["hidden"]), "d_params": d_params}

    rows = put_rows(place.plan, place.mesh, {n: a for n, a in given.items() if n not in ("weight", "bias")})
    out = jax.tree.map(np.asarray, everything(put_params(place, case, given), rows))
    gradients = out.pop("d_params")
    names = (("d_weight", case.path), ("d_bias", "lm_head/bias"))
    for (name, path), gradient in zip(names, gradients, strict=False):
        d = place.plan[path]
        out[name] = place.plan.padding.trim(gradient, d.axes)
        np.testing.assert_array_equal(gradient, place.plan.padding.pad(out[name], d.axes, d.shape))
    assert np.isneginf(out["logits"][..., case.vocab :]).all()
    out["logits"] = out["logits"][..., : case.vocab]
    np.testing.assert_allclose(out["loss"], out.pop("loss_alone"), rtol=1e-6)
    return out


def check(case: Case) -> None:
    with jax.enable_x64(case.dtype == "float64"):
        place = case.placement()
        assert place.plan[case.path].at_use() == {
            "vocab": (("tp",), ()), "hidden": ((), ("tp",)), "replicated": ((), ())
        }[case.layout]  # fmt: skip
        given = case.inputs()
        want, got = case.reference(given, Z_LOSS), computed(place, case, given)
    # Every number is a sum of at most B·T·V·D products, in unknown order; half an ulp each, growing with the
    # root, and some ten operations a term.
    count = given["hidden"].size * case.vocab
    tolerance = 10 * np.finfo(case.dtype).eps / 2 * math.sqrt(count)
    for name in ("logits", "loss", "d_hidden", "d_weight", "nll", *(["d_bias"] if case.bias else [])):
        scale = max(np.abs(want[name]).max(), 1.0)
        np.testing.assert_allclose(got[name], want[name], atol=tolerance * scale, rtol=0, err_msg=name)
    np.testing.assert_array_equal(got["right"], want["right"])
    top = min(TOP, case.vocab)
    np.testing.assert_array_equal(got["top_ids"], want["top_ids"][..., :top])
    scale = np.abs(want["top_logprobs"]).max()
    np.testing.assert_allclose(got["top_logprobs"], want["top_logprobs"][..., :top], atol=tolerance * scale)


# Neither 23 nor 11 is divided by any tp. Tied, bias and the dim that fsdp cuts (of 24 or 12, which it
# divides) vary with the mesh and the layout.
CASES = [
    Case(
        layout, sizes, vocab=24 if sizes[1] > 1 else 23, embed=12 if sizes[1] > 1 else 11, rows=2, length=5,
        tied=(i + j) % 2 == 0, bias=(i // 2 + j) % 2 == 0, fsdp_dim=(i + j // 2) % 2,
    )
    for i, sizes in enumerate(MESHES)
    for j, layout in enumerate(LAYOUTS)
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.layout}-{'x'.join(map(str, c.sizes))}")
def test_loss_gradients_scores_and_logits_equal_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # two positions a chunk and one of filling
    width = case.vocab // case.sizes[2] if case.layout == "vocab" else case.vocab
    monkeypatch.setattr(loss, "CHUNK_BYTES", case.rows * (width + 1) * 8 * 2)
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("sizes", "fsdp_dim"), [(sizes, dim) for sizes in MESHES for dim in (0, 1) if dim or sizes[1] > 1]
)
def test_the_full_matrix_equals_float64(sizes, fsdp_dim, layout, bias, tied) -> None:
    for vocab, embed in ((103, 10), (24, 12)):
        check(Case(layout, sizes, vocab, embed, 1, 4, tied, bias, fsdp_dim=fsdp_dim))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any head: more devices than ids or features among them."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]))
    fsdp = draw(st.sampled_from([1, 2] if tp <= 4 else [1]))
    return Case(
        draw(st.sampled_from(LAYOUTS)), (1, fsdp, tp), draw(st.integers(2, 40)), draw(st.integers(1, 20)),
        draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.booleans()), draw(st.booleans()),
        draw(st.sampled_from(["float32", "float64"])), draw(st.sampled_from([None, 0, 1])),
    )  # fmt: skip


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_head_equals_float64(case: Case) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_very_many_heads_equal_float64(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("sizes", [(2, 2, 2), pytest.param((1, 1, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "spec",
    [
        "tp,dp", "dp,tp", "(dp,tp),fsdp", "None,(fsdp,tp)", "(fsdp,tp),None", "fsdp,tp", "dp,fsdp", "fsdp,dp",
        "None,(tp,fsdp)", "None,(tp,dp,fsdp)", "None,None",
    ],
)  # fmt: skip
def test_a_head_that_an_override_cuts_in_any_way_is_right(spec: str, sizes: tuple[int, int, int]) -> None:
    case = Case("replicated", sizes, vocab=24, embed=16, rows=1, length=3, tied=True, bias=True)
    with jax.enable_x64(True):
        place = case.placement()
        overrides = [Override.parse(f"embed/table={spec}")]
        plan = plan_model(place.plan.config, place.plan.mesh, overrides=overrides)
        place = replace(place, plan=plan)
        given = case.inputs()
        want, got = case.reference(given, Z_LOSS), computed(place, case, given)
    for name in ("logits", "loss", "d_hidden", "d_weight", "d_bias", "nll"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-11, atol=1e-11, err_msg=name)
    np.testing.assert_array_equal(got["top_ids"], want["top_ids"][..., :TOP])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fsdp_may_cut_the_head_without_splitting_the_batch(layout: str) -> None:
    case = Case(layout, (2, 2, 2), vocab=24, embed=12, rows=1, length=3, bias=True)
    with jax.enable_x64(True):
        place = case.placement()
        split = [replace(a, spec=(("dp",), *a.spec[1:])) for a in place.plan.activations]
        place = replace(place, plan=replace(place.plan, activations=tuple(split)))
        assert place.plan.batch_axes() == ("dp",)
        assert place.plan[case.path].at_use() != place.plan[case.path].spec
        given = case.inputs()
        want, got = case.reference(given, Z_LOSS), computed(place, case, given)
    for name in ("logits", "loss", "d_hidden", "d_weight", "d_bias", "nll"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_of_ten_ids_on_tp_4_is_a_target_like_any_other(layout: str) -> None:
    case = Case(layout, (1, 1, 4), vocab=10, embed=10, rows=2, length=3, bias=True)
    given = case.inputs()
    given["targets"][:] = 9
    with jax.enable_x64(True):
        place = case.placement()
        padded = {"vocab": (12, 10), "hidden": (10, 12), "replicated": (10, 10)}
        assert place.plan["lm_head/kernel"].shape == padded[layout]
        got = computed(place, case, given)
    want = case.reference(given, Z_LOSS)
    for name in ("loss", "d_hidden", "d_weight", "d_bias", "nll"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 2, 2)])
def test_padded_ids_stay_out_where_every_true_logit_is_below_zero(
    layout: str, sizes: tuple[int, int, int]
) -> None:
    # Zero rows of padding would give logits of 0 and win; all true ones are −5.
    case = Case(layout, sizes, vocab=9, embed=10, rows=2, length=3, dtype="float32")
    place, given = case.placement(), case.inputs()
    given["hidden"][:], given["weight"][:] = 1.0, -0.5
    got = computed(place, case, given)
    np.testing.assert_allclose(got["nll"], np.log(9), rtol=1e-6)
    np.testing.assert_array_equal(got["top_ids"], np.broadcast_to(np.arange(TOP), got["top_ids"].shape))
    np.testing.assert_allclose(got["top_logprobs"], -np.log(9), rtol=1e-6)
    rows = given["hidden"].shape[0]
    number = partial(np.full, (rows,))
    params = SamplingParams(
        number(100.0, np.float32), number(0, np.int32), number(1.0, np.float32), number(0.0, np.float32),
        np.arange(rows, dtype=np.uint32),
    )  # fmt: skip

    @jax.jit
    def choose(weight: jax.Array, hidden: jax.Array, position: int) -> tuple[jax.Array, jax.Array]:
        head = Head.of(place, case.path, weight)
        logits = head_logits(place, head, hidden[:, :1])[:, 0]
        positions = jnp.full((rows,), position, jnp.int32)
        drawn = sampling.sample(place, logits, head.vocab_axes, params, positions)
        return sampling.greedy(place, logits, head.vocab_axes), drawn

    (weight,) = put_params(place, case, given)
    hidden = put_rows(place.plan, place.mesh, {"hidden": given["hidden"]})["hidden"]
    drawn = []
    for position in range(60):
        greedy, sampled = choose(weight, hidden, position)
        np.testing.assert_array_equal(greedy, 0)
        drawn += np.asarray(sampled).tolist()
    assert set(drawn) == set(range(9))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2)])
def test_a_bias_and_its_gradient_are_counted_once(layout: str, sizes: tuple[int, int, int]) -> None:
    case = Case(layout, sizes, vocab=16, embed=8, rows=1, length=2, bias=True)
    given = case.inputs()
    given["hidden"][:] = 0  # nothing but the bias is left
    given["weights"][:] = 1
    with jax.enable_x64(True):
        got = computed(case.placement(), case, given)
    np.testing.assert_array_equal(got["logits"], np.broadcast_to(given["bias"], got["logits"].shape))
    want = case.reference(given, Z_LOSS)
    np.testing.assert_allclose(got["d_bias"], want["d_bias"], rtol=1e-12, atol=1e-12)
    assert np.abs(want["d_bias"]).max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_holds_logits_of_one_chunk_only(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(layout, (1, 1, 2), vocab=1000, embed=16, rows=2, length=64, dtype="float32")
    place = case.placement()
    width = {"vocab": 500}.get(layout, 1000)
    d = place.plan[case.path]
    weight = jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=place.plan.sharding(place.mesh, d.path))
    shapes = [((2, 64, 16), jnp.float32), ((2, 64), jnp.int32), ((2, 64), jnp.float32)]
    rows = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def total(weight: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy(place, hidden, Head.of(place, case.path, weight), targets, weights, Z_LOSS)

    def largest() -> int:
        # a function of its own each time: JAX remembers what it traced, with the chunk of then
        step = jax.jit(jax.value_and_grad(lambda *args: total(*args), argnums=(0, 1)))
        return largest_array(step.lower(weight, *rows).compile().as_text())

    assert largest() == 2 * 64 * width, "the search must see all logits where all are one chunk"
    monkeypatch.setattr(loss, "CHUNK_BYTES", 2 * width * 4 * 8)
    assert largest() <= 2 * 8 * 1000 == 1000 * 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("sizes", "fsdp_dim"), [((2, 1, 3), 1), ((2, 2, 2), 0), ((2, 2, 2), 1)])
def test_look_up_takes_the_very_rows(layout: str, sizes: tuple[int, int, int], fsdp_dim: int) -> None:
    case = Case(layout, sizes, vocab=24, embed=14, rows=2, length=12, tied=True, fsdp_dim=fsdp_dim)
    with jax.enable_x64(True):
        place, given = case.placement(), case.inputs()
        given["tokens"][0] = np.arange(12)
        given["tokens"][1] = np.arange(12, 24)
        upstream = given["hidden"]
        (table,) = put_params(place, case, given)
        rows = put_rows(place.plan, place.mesh, {"tokens": given["tokens"], "upstream": upstream})

        @jax.jit
        def both(table: jax.Array, tokens: jax.Array, upstream: jax.Array) -> tuple[jax.Array, jax.Array]:
            found, back = jax.vjp(
                lambda t: look_up(place, VocabMatrix.of(place, case.path, t), tokens, case.embed), table
            )
            return found, back(upstream)[0]

        found, gradient = both(table, rows["tokens"], rows["upstream"])
    np.testing.assert_array_equal(found, given["weight"][given["tokens"]])
    want = np.zeros_like(given["weight"])
    np.add.at(want, given["tokens"], upstream)
    d = place.plan[case.path]
    got = place.plan.padding.trim(np.asarray(gradient), d.axes)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(gradient, place.plan.padding.pad(got, d.axes, d.shape))


@pytest.mark.parametrize("axes", [(), ("tp",)])
def test_the_greatest_values_are_listed_with_the_lowest_ids_of_equals(axes: tuple[str, ...]) -> None:
    mesh = build_mesh(MeshSpec(1, 1, 4), jax.devices()[:4])
    values = np.tile(np.float32([1, 7, 7, 0, 7, 9, -np.inf, 7, 7, 0, 0, 8]), (2, 3, 1))
    want = np.argsort(-values, -1, kind="stable")
    for n in (1, 2, 3, 4, 7, 12):  # a device has three
        top = jax.jit(jax.shard_map(
            lambda v, n=n: Columns(axes, v.shape[-1]).top(v, n),
            mesh=mesh,
            in_specs=partition_spec(((), (), axes)),
            out_specs=partition_spec(((), (), ())),
            check_vma=False,
        ))  # fmt: skip
        found, ids = top(values)
        np.testing.assert_array_equal(ids, want[..., :n])
        np.testing.assert_array_equal(found, np.take_along_axis(values, want, -1)[..., :n])
