"""From arrays on a mesh back to Hugging Face tensors: trimmed, split by layer, in the file's order.

Not here: writing the folder (hf_writer.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwise.checkpoints.hf_writer import write_hf_folder
from shardwise.families import TensorName, config_to_hf, get_family
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
    names = family.tensor_names(plan.config)
    whole = named_sharding(mesh, ())
    gather = jax.jit(lambda x: x, out_shardings=whole)
    pick = jax.jit(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), out_shardings=whole)

    def host(array: jax.Array) -> np.ndarray:
        return np.asarray(array.addressable_data(0))

    for name in names:
        if not plan[name.path].stacked:
            yield name.hf_name, _to_file(plan, name, host(gather(params[name.path])), dtype)
            continue
        for layer, path in enumerate(layer_paths(plan, name.path)):
            array = gather(params[path]) if path in params else pick(params[name.path], layer)
            yield name.hf_name.format(layer=layer), _to_file(plan, name, host(array), dtype)


def _to_file(plan: Plan, name: TensorName, array: np.ndarray, dtype: str | None) -> np.ndarray:
    decision = plan[name.path]
    axes = decision.axes[decision.stacked :]
    true = plan.padding.trim(array, axes)
    order = [axes.index(axis) for dim in name.hf_dims for axis in dim]
    sizes = plan.config.sizes()
    shape = [math.prod(sizes[axis] for axis in dim) for dim in name.hf_dims]
    out = np.ascontiguousarray(true.transpose(order)).reshape(shape)
    return out.astype(jax.numpy.dtype(dtype)) if dtype else out


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
