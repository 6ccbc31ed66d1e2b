"""From arrays on a mesh back to Hugging Face tensors: trimmed, split by layer, in the file's order.

Not here: writing the folder (hf_writer.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwise.checkpoints.hf_writer import write_hf_folder
from shardwise.checkpoints.load import deinterleaved, tensor_files
from shardwise.families import TensorName, config_to_hf, get_family
from shardwise.families.base import PARTS
from shardwise.models.parameters import Params, layer_paths
from shardwise.partition.plan import Plan, named_sharding
from shardwise.runtime.distributed import is_main_process


def hf_tensors(
    plan: Plan, mesh: jax.sharding.Mesh, params: Params, dtype: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint under its Hugging Face name, one at a time.

    Args:
        params: stacked or one array per layer.
        dtype: None keeps the arrays' own.

    With several processes all must iterate, since gathering a cut tensor takes part of each.
    """
    family = get_family(plan.config.family)
    by_file: dict[str, list[TensorName]] = {}
    for name in family.tensor_names(plan.config):
        by_file.setdefault(name.hf_name, []).append(name)
    whole = named_sharding(mesh, ())
    gather = jax.jit(lambda x: x, out_shardings=whole)
    pick = jax.jit(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), out_shardings=whole)

    def host(name: TensorName, layer: int) -> np.ndarray:
        """A parameter's layer, trimmed to its true shape."""
        if not plan[name.path].stacked:
            array = gather(params[name.path])
        else:
            path = layer_paths(plan, name.path)[layer]
            array = gather(params[path]) if path in params else pick(params[name.path], layer)
        return plan.padding.trim(np.asarray(array.addressable_data(0)), _axes(plan, name))

    for file, parts in by_file.items():
        layers = plan.config.num_layers if "{layer}" in file else 1
        for layer in range(layers):
            arrays = [host(name, layer) for name in parts]
            for expert, hf_name in enumerate(tensor_files(plan.config, parts[0], layer)):
                own = [array[expert] for array in arrays] if "{expert}" in file else arrays
                yield hf_name, _to_file(plan, parts, own, dtype)


def _axes(plan: Plan, name: TensorName) -> tuple[str, ...]:
    """Logical axes of one layer of a parameter."""
    decision = plan[name.path]
    return decision.axes[decision.stacked :]


def _to_file(plan: Plan, parts: list[TensorName], arrays: list[np.ndarray], dtype: str | None) -> np.ndarray:
    """One tensor of the file from the parameters that it holds."""
    sizes = plan.config.sizes()
    ordered = []
    for name, array in zip(parts, arrays, strict=True):
        axes = _axes(plan, name)
        axes = axes[1:] if "{expert}" in name.hf_name else axes
        if name.interleaved:
            at = axes.index("head_dim")
            array = array.take(np.argsort(deinterleaved(name.interleaved, array.shape[at])), axis=at)
        order = [axes.index(axis) for dim in name.hf_dims for axis in dim if axis != PARTS]
        ordered.append(array.transpose(order))
    first = parts[0]
    if any(PARTS in dim for dim in first.hf_dims):
        assert [name.part[0] for name in parts] == list(range(first.part[1])), f"parts of {first.hf_name}"
        split = [_around_parts(name, sizes) for name in parts]
        out = np.stack([a.reshape(shape) for a, (shape, _) in zip(ordered, split, strict=True)], split[0][1])
        out = out.reshape(first.hf_shape(sizes))
    else:
        rows = [array.reshape(-1, *first.hf_shape(sizes)[1:]) for array in ordered]
        by_place = sorted(range(len(parts)), key=lambda i: len(parts[i].before))
        out = rows[0] if len(rows) == 1 else np.concatenate([rows[i] for i in by_place])
    out = np.ascontiguousarray(out)
    return out.astype(jax.numpy.dtype(dtype)) if dtype else out


def _around_parts(name: TensorName, sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """A part's shape, its file dims merged but for the one with `PARTS`, which is split there; and where the
    axis of all parts goes."""
    shape: list[int] = []
    at = 0
    for dim in name.hf_dims:
        pieces = [dim]
        if PARTS in dim:
            cut = dim.index(PARTS)
            pieces, at = [dim[:cut], dim[cut + 1 :]], len(shape) + 1
        shape += [math.prod(sizes[axis] for axis in piece) for piece in pieces]
    return shape, at


def export(
    out: str | Path,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: Params,
    *,
    dtype: str | None = None,
    hf_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    tokenizer: Any = None,
) -> None:
    """Write a folder that transformers and vLLM load.

    Args:
        out: must not exist yet.
        dtype: of all tensors; None keeps the arrays' own.
        hf_config: the source checkpoint's config; keys that we do not translate (ids of special tokens, …)
            are kept from it.

    Raises:
        CheckpointError: `out` exists or cannot be written.
    """
    kept = {
        k: v
        for k, v in (hf_config or {}).items()
        if k not in ("torch_dtype", "dtype", "transformers_version")
    }
    kind = dtype or str(next(iter(params.values())).dtype)
    config = {**kept, **config_to_hf(plan.config), "torch_dtype": kind, "dtype": kind}
    tensors = hf_tensors(plan, mesh, params, dtype)
    if is_main_process():
        write_hf_folder(
            Path(out),
            hf_config=config,
            tensors=tensors,
            tokenizer=tokenizer,
            generation_config=generation_config,
        )
    else:
        for _ in tensors:
            pass
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("export")
