"""From an opened checkpoint to arrays on the mesh: each device's slice is read and placed on it.

Tensors are read by rows, so that no more than one device's array of one parameter is in host memory at a
time. Not here: file formats (reader.py and its readers) and training checkpoints (native.py).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from shardwise.checkpoints.reader import Checkpoint, TensorInfo, TensorReader
from shardwise.errors import CheckpointError
from shardwise.families import Family, TensorName, get_family
from shardwise.families.base import PARTS
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import Params, layer_paths
from shardwise.partition.plan import Decision, Plan, named_sharding
from shardwise.partition.rules import Spec

READ_BYTES = 16 << 20
"""Rows are read in pieces of about this many bytes."""

_ALIGNMENT = 64
"""Bytes; XLA's for arrays of a CPU."""

_Range = tuple[int, int]  # start, stop
_Part = tuple[dict[str, _Range], dict[str, int]]
"""By logical axis: a true range of the tensor, and where it goes in the array to fill."""


@dataclass(frozen=True)
class _Source:
    """One tensor of the file and how its dims map to ours."""

    reader: TensorReader
    name: str
    tensor: TensorName
    sizes: Mapping[str, int]
    """Of every axis in the file's dims."""

    @classmethod
    def of(cls, reader: TensorReader, config: ModelConfig, tensor: TensorName, layer: int) -> list[_Source]:
        """The tensors that hold a parameter's layer: one, or one for each expert."""
        sizes = {**config.sizes(), PARTS: tensor.part[1]}
        names = tensor_files(config, tensor, layer)
        return [cls(reader, name, tensor, sizes) for name in names]


def load_params(
    checkpoint: Checkpoint,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    dtype: str | None,
    stacked: bool,
    without: Collection[str] = (),
) -> Params:
    """Read all parameters onto the mesh.

    Args:
        dtype: of the arrays; None keeps each tensor's own (with stacked layers the widest of all).
        stacked: one array for all layers (training), or one per layer (decoding).
        without: paths to leave out, those of another head than the file's.

    Raises:
        CheckpointError: weights are absent; tensors missing, unexpected or of the wrong shape (all named at
            once).
    """
    if checkpoint.reader is None:
        raise CheckpointError(f"{checkpoint.path} holds a configuration but no weights, which this needs")
    names = check_tensors(checkpoint.reader, plan.config, str(checkpoint.path), without)
    infos = checkpoint.reader.tensors()
    params: Params = {}
    for path in plan.paths:
        if path in without:
            continue
        decision, name = plan[path], names[path]
        layers = range(plan.config.num_layers) if decision.stacked else (0,)
        sources = [_Source.of(checkpoint.reader, plan.config, name, layer) for layer in layers]
        given = np.dtype(jax.numpy.dtype(dtype)) if dtype else None
        own = [given or np.result_type(*(infos[source.name].dtype for source in s)) for s in sources]
        if stacked or not decision.stacked:
            kind = np.result_type(*own)
            params[path] = _place(plan, mesh, decision, decision.shape, decision.spec, sources, kind)
            continue
        for one, source, kind in zip(layer_paths(plan, path), sources, own, strict=True):
            params[one] = _place(plan, mesh, decision, decision.shape[1:], decision.spec[1:], [source], kind)
    return params


def check_tensors(
    reader: TensorReader, config: ModelConfig, where: str, without: Collection[str] = ()
) -> dict[str, TensorName]:
    """Compare the tensors that there are with those that the model needs.

    Args:
        without: paths that are not needed; tensors of any head may then be there.

    Returns:
        Parameter path → tensor name.

    Raises:
        CheckpointError: names every missing, unexpected and wrongly shaped tensor, and those that are no
            floats.
    """
    family, sizes = get_family(config.family), config.sizes()
    have = reader.tensors()
    names = [name for name in _as_found(family, config, have) if name.path not in without]
    wanted: dict[str, tuple[int, ...]] = {}
    for name in names:
        layers = range(config.num_layers) if "{layer}" in name.hf_name else (0,)
        files = [file for layer in layers for file in tensor_files(config, name, layer)]
        wanted.update(dict.fromkeys(files, name.hf_shape(sizes)))
    ignored = _any_of((*family.ignored_tensors, *(family.head_tensors if without else ())))
    missing = [name for name in wanted if name not in have]
    extra = [name for name in have if name not in wanted and not ignored.fullmatch(name)]
    unused = [name for name in extra if _any_of(family.unused_tensors).fullmatch(name)]
    copies = {copy: name.hf_name for name in names for copy in name.copies if name.hf_name in have}
    extra = [n for n in extra if n not in unused and not (n in copies and _same(reader, n, copies[n]))]
    head = family.head_tensor
    if config.tie_embeddings and head in extra and _same(reader, head, _table(names)):
        extra.remove(head)  # a copy of the tied table, as some tools write it
    numbers = [
        f"{name} is {have[name].dtype}"
        for name in wanted
        if name in have and not jax.numpy.issubdtype(have[name].dtype, jax.numpy.floating)
    ]
    wrong = [
        f"{name} is {list(have[name].shape)}, should be {list(shape)}"
        for name, shape in wanted.items()
        if name in have and tuple(have[name].shape) != shape
    ]
    problems = []
    kinds = {
        "missing": missing, "unexpected": extra, "of the wrong shape": wrong,
        "of a dtype that weights cannot have (quantised?)": numbers,
    }  # fmt: skip
    for kind, found in kinds.items():
        if found:
            problems.append(f"{len(found)} {kind}: {', '.join(found)}")
    if problems:
        hint = ""
        if head in missing:
            alone = not any(name.startswith(tuple(filter(None, family.bases))) for name in have)
            base = "this is the base model, saved without its head: save the model with its head; " * alone
            hint = (
                f"; {base}if the head is the embedding table, set tie_word_embeddings to true in config.json"
            )
        elif head in extra and config.tie_embeddings:
            hint = (
                f"; {head} differs from the embedding table although config.json says"
                " tie_word_embeddings: set it to false to use this head"
            )
        elif missing and all(_any_of(family.head_tensors).fullmatch(name) for name in missing):
            hint = (
                f"; all that is missing is the head: for the encoder alone set architectures to"
                f" {[family.heads['none']]}, or give the model a head with `shardwise finetune --objective`"
            )
        raise CheckpointError(f"{where} does not fit its config: {'; '.join(problems)}{hint}")
    if unused:
        warnings.warn(
            f"{where}: not read, since nothing here computes with it: {', '.join(unused)}", stacklevel=2
        )
    return {name.path: name for name in names}


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for p in patterns) or r"(?!)")


def tensor_files(config: ModelConfig, tensor: TensorName, layer: int) -> list[str]:
    """Names in the file of what holds a parameter's layer: one, or one for each expert."""
    experts = range(config.num_experts) if "{expert}" in tensor.hf_name else (0,)
    return [tensor.hf_name.format(layer=layer, expert=expert) for expert in experts]


def _as_found(family: Family, config: ModelConfig, have: Mapping[str, TensorInfo]) -> list[TensorName]:
    """The family's tensor names with the beginning that this file's names have."""
    names = family.tensor_names(config)
    usual = family.bases[0]
    table = _table(names).removeprefix(usual)
    base = next((base for base in family.bases if base + table in have), usual)
    other = {ours: theirs for ours, theirs in family.also_named if ours not in have and theirs in have}

    def found(name: TensorName) -> str:
        usual_name = name.hf_name
        here = other.get(usual_name) or (
            base + usual_name.removeprefix(usual) if usual_name.startswith(usual) else usual_name
        )
        return here if here in have else next((copy for copy in name.copies if copy in have), here)

    return [replace(name, hf_name=found(name)) for name in names]


def _table(names: Sequence[TensorName]) -> str:
    return next(name.hf_name for name in names if name.path == "embed/table")


def _same(reader: TensorReader, a: str, b: str) -> bool:
    infos = reader.tensors()
    if b not in infos or infos[a].shape != infos[b].shape or infos[a].dtype != infos[b].dtype:
        return False
    rows = infos[a].shape[0]
    step = max(1, READ_BYTES * rows // max(1, math.prod(infos[a].shape) * infos[a].dtype.itemsize))
    pieces = ((start, min(rows, start + step)) for start in range(0, rows, step))
    return all(reader.rows(a, *p).tobytes() == reader.rows(b, *p).tobytes() for p in pieces)


def _place(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    decision: Decision,
    shape: tuple[int, ...],
    spec: Spec,
    sources: list[list[_Source]],
    dtype: np.dtype,
) -> jax.Array:
    """One parameter, built device by device; the same slice on several devices is read once."""
    sharding = named_sharding(mesh, spec)
    by_slice: dict[tuple[_Range, ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        by_slice.setdefault(ranges, []).append(device)
    arrays = []
    for ranges, devices in by_slice.items():
        local = _read_slice(plan, decision, ranges, sources, dtype)
        arrays += [jax.device_put(local, device) for device in devices]
        jax.block_until_ready(arrays)  # so that the host copy can be freed before the next is made
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_slice(
    plan: Plan,
    decision: Decision,
    ranges: tuple[_Range, ...],
    sources: list[list[_Source]],
    dtype: np.dtype,
) -> np.ndarray:
    """A slice of a parameter; `sources` are those of each layer in turn."""
    out = _aligned_zeros([stop - start for start, stop in ranges], dtype)
    if decision.stacked and len(ranges) == len(decision.axes):
        (first, last), inner = ranges[0], ranges[1:]
        for layer in range(first, last):
            _fill_layer(plan, decision.axes[1:], out[layer - first], inner, sources[layer])
    else:
        _fill_layer(plan, decision.axes[decision.stacked :], out, ranges, sources[0])
    return out


def _aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin where XLA wants arrays to begin: a CPU device then takes them over as they are, where
    a copy would take several times as long as reading the file."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _fill_layer(
    plan: Plan, axes: Sequence[str], out: np.ndarray, ranges: tuple[_Range, ...], sources: list[_Source]
) -> None:
    """Fill one layer's slice; with experts, from the tensor of each."""
    if axes[0] != "experts" or len(sources) == 1:
        _fill(plan, axes, out, ranges, sources[0])
        return
    start, stop = ranges[0]
    for expert in range(start, min(stop, len(sources))):
        _fill(plan, axes[1:], out[expert - start], ranges[1:], sources[expert])


def _fill(
    plan: Plan, axes: Sequence[str], out: np.ndarray, ranges: tuple[_Range, ...], source: _Source
) -> None:
    """Fill a slice from one tensor of the file; what is padding stays zero.

    Args:
        axes: logical axis of each dim of `out`.
        ranges: (start, stop) of each dim in the physical tensor.
    """
    blocks: list[_Part] = [({}, {})]
    for axis, (start, stop) in zip(axes, ranges, strict=True):
        # Unless kv heads are repeated, a slot is a kv head, and one block takes all.
        if axis == "heads" and plan.padding.heads.repeat > 1:
            at = list(axes).index("q_per_kv")
            blocks = [_query_block(*run, start, ranges[at]) for run in plan.padding.heads.runs(start, stop)]
            blocks = [block for block in blocks if block[0]["q_per_kv"][0] < block[0]["q_per_kv"][1]]
    for true, offset in blocks:
        for axis, (start, stop) in zip(axes, ranges, strict=True):
            if axis not in true:
                true[axis], offset[axis] = (start, min(stop, source.sizes[axis])), 0
        if any(start >= stop for start, stop in true.values()):
            continue
        where = tuple(slice(offset[a], offset[a] + true[a][1] - true[a][0]) for a in axes)
        file_order = [axis for dim in source.tensor.hf_dims for axis in dim]
        view = out[where].transpose([list(axes).index(axis) for axis in file_order if axis != PARTS])
        if PARTS in file_order:
            view = np.expand_dims(view, file_order.index(PARTS))
            true[PARTS] = (source.tensor.part[0], source.tensor.part[0] + 1)
        _copy_turned(view, source, true, file_order)


def _copy_turned(
    view: np.ndarray, source: _Source, ranges: dict[str, _Range], file_order: Sequence[str]
) -> None:
    """`_copy`, where features of a head lie interleaved with these put into our order."""
    if not source.tensor.interleaved:
        _copy(view, source, ranges)
        return
    size, at = source.sizes["head_dim"], list(file_order).index("head_dim")
    whole = np.empty((*view.shape[:at], size, *view.shape[at + 1 :]), view.dtype)
    _copy(whole, source, ranges | {"head_dim": (0, size)})
    order = deinterleaved(source.tensor.interleaved, size)
    view[...] = whole.take(order[slice(*ranges["head_dim"])], axis=at)


def deinterleaved(turning: int, size: int) -> np.ndarray:
    """For each feature of ours where it lies in a file that has pairs side by side: int [size].

    Args:
        turning: features that turn; those behind stay.
    """
    return np.concatenate([np.arange(0, turning, 2), np.arange(1, turning, 2), np.arange(turning, size)])


def _query_block(slot: int, kv_head: int, first: int, count: int, start: int, group: _Range) -> _Part:
    """True ranges and offsets of one slot's query heads, as far as `group` (a range of places) goes."""
    low, high = group[0], min(group[1], count)
    true = {"heads": (kv_head, kv_head + 1), "q_per_kv": (first + low, first + high)}
    return true, {"heads": slot - start, "q_per_kv": 0}


def _copy(view: np.ndarray, source: _Source, ranges: Mapping[str, _Range]) -> None:
    """Copy a block of the file's tensor into `view`, whose dims are its logical axes in the file's order."""
    dims = source.tensor.hf_dims
    rows, columns = dims[0], [axis for dim in dims[1:] for axis in dim]
    info = source.reader.tensors()[source.name]
    column_sizes = [source.sizes[axis] for axis in columns]
    column_slices = tuple(slice(*ranges[axis]) for axis in columns)
    row_bytes = math.prod(info.shape[1:]) * info.dtype.itemsize

    def copy(view: np.ndarray, axes: Sequence[str], base: int) -> None:
        start, stop = ranges[axes[0]]
        inner = math.prod(source.sizes[axis] for axis in axes[1:])
        if any(ranges[axis] != (0, source.sizes[axis]) for axis in axes[1:]):
            for i in range(start, stop):
                copy(view[i - start], axes[1:], base + i * inner)
            return
        step = max(1, READ_BYTES // max(1, row_bytes * inner))
        for i in range(start, stop, step):
            j = min(i + step, stop)
            block = source.reader.rows(source.name, base + i * inner, base + j * inner)
            block = block.reshape(j - i, *(source.sizes[axis] for axis in axes[1:]), *column_sizes)
            view[i - start : j - start] = block[(slice(None),) * len(axes) + column_slices]

    copy(view, rows, sum(math.prod(source.sizes[axis] for axis in dim) for dim in source.tensor.before))
