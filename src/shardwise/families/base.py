"""The form of a family: what each family file fills in.

A tensor's name carries the logical axes of its dims *in the file's order*; the loader turns it into ours by
transposing and splitting, so that a family needs no code for layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.models.config import Activation, ModelConfig

Head = Literal["vocab", "labels", "none"]
"""See ModelConfig.head."""
Dim = tuple[str, ...]
"""Logical axes over which one dim of a file's tensor runs, slowest first."""
PARTS = "parts"
"""See TensorName.hf_dims."""


@dataclass(frozen=True)
class TensorName:
    """One parameter of ours and the tensor of a Hugging Face checkpoint that holds it."""

    path: str
    """Our parameter path; below `layers/` it stands for all layers."""
    hf_name: str
    """Hugging Face name; `{layer}` stands for the layer's number."""
    hf_dims: tuple[Dim, ...]
    """For each dim of the file's tensor, the logical axes that it runs over, slowest first:
    (("heads", "q_per_kv", "head_dim"), ("embed",)) is q_proj's (H·E, D). `PARTS` stands for an axis over
    several parameters of ours, of which this is one."""
    part: tuple[int, int] = (0, 1)
    """Where `PARTS` is in `hf_dims`: which of the parts, and how many there are. BLOOM's fused q is
    (("heads", "q_per_kv", PARTS, "head_dim"), ("embed",)) with part (0, 3)."""
    before: tuple[Dim, ...] = ()
    """Blocks that lie before this parameter in dim 0 of the file's tensor, one behind the other."""
    after: tuple[Dim, ...] = ()
    """Blocks that lie behind it (Phi-3: q, k and v are rows of one tensor)."""
    copies: tuple[str, ...] = ()
    """Names under which files may hold the same tensor again, or instead (`lm_head.decoder.bias`)."""
    interleaved: int = 0
    """So many leading features of each head lie in the file as pairs (0, 1), (2, 3), … that turn together
    (GPT-J); ours turn feature i with feature i + half."""

    @property
    def fused(self) -> bool:
        """Whether the file's tensor holds other parameters too."""
        return self.part[1] > 1 or bool(self.before or self.after)

    def hf_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the whole tensor in the file."""
        sizes = {**sizes, PARTS: self.part[1]}
        first, *rest = (math.prod(sizes[axis] for axis in dim) for dim in self.hf_dims)
        others = sum(math.prod(sizes[axis] for axis in dim) for dim in (*self.before, *self.after))
        return (first + others, *rest)


@dataclass(frozen=True)
class Family:
    """One family of models that share config keys and tensor names."""

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    """The keys that describe the model; what they cannot say is found by reading them back."""
    tensor_names: Callable[[ModelConfig], tuple[TensorName, ...]]
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of tensors that files may carry and that hold nothing to learn (rotary buffers)."""
    unused_tensors: tuple[str, ...] = ()
    """The same of learned ones that nothing here computes with (BERT's pooler); leaving them out is told."""
    bases: tuple[str, ...] = ("model.", "")
    """What the names of the base model's tensors begin with: first as `tensor_names` has it, then other
    spellings, as a checkpoint of the base model alone has them."""
    head_tensor: str = "lm_head.weight"
    """Name of the head's matrix, which some tools write even where it is the embedding table."""
    also_named: tuple[tuple[str, str], ...] = ()
    """Pairs of a tensor's name in `tensor_names` and another one that some files have instead."""
    heads: Mapping[Head, str] = field(default_factory=dict)
    """What `architectures` says of each head that a model of this family may have, where it has a choice."""
    head_tensors: tuple[str, ...] = ()
    """Regular expressions of all heads' tensors: what another head than the file's takes no notice of."""


def require(hf: Mapping[str, Any], key: str, kind: type = int) -> Any:
    """The value of `key`, checked for presence and type."""
    value = hf.get(key)
    if value is None:
        raise ConfigError(f"config.json has no {key!r}, which this model needs")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"config.json: {key} is {value!r}; expected {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config.json: {key} is {value}; expected a finite number")
    return value


def optional(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key` with the default's type checked, or the default where the key is absent or null."""
    return default if hf.get(key) is None else require(hf, key, type(default))


def refuse_unsupported(hf: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], family: str) -> None:
    """Refuse keys that change the mathematics in a way this family does not implement.

    Args:
        neutral: for each such key, the values that change nothing.
    """
    for key, allowed in neutral.items():
        if key in hf and hf[key] not in allowed:
            raise ConfigError(
                f"config.json: {key} = {hf[key]!r} changes the computation and is not supported for {family};"
                f" supported: {', '.join(map(repr, allowed))}"
            )


def activation_from_hf(hf: Mapping[str, Any], key: str, default: str) -> Activation:
    """The non-linearity that `key` names."""
    name = optional(hf, key, default)
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: {key} is {name!r}, which is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
}


def activation_to_hf(activation: Activation) -> str:
    """The name that `activation_from_hf` reads as this non-linearity, and that every transformers knows."""
    return {"gelu_tanh": "gelu_new", "gelu_quick": "quick_gelu"}.get(activation, activation)


def head_dim_from(
    hf: Mapping[str, Any], embed: str = "hidden_size", heads: str = "num_attention_heads"
) -> int:
    """The width of a head: `head_dim`, or the size under the key `embed` over the number under `heads`."""
    if hf.get("head_dim") is not None:
        return int(require(hf, "head_dim"))
    width, number = require(hf, embed), require(hf, heads)
    if number < 1 or width % number:
        raise ConfigError(f"config.json: {embed} {width} is no multiple of {heads} {number}")
    return int(width // number)


def split_heads(hf: Mapping[str, Any], embed: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """The width of a head in a family that has no key for it: what `embed` says, over what `heads` says."""
    found = head_dim_from({key: hf.get(key) for key in (embed, heads)}, embed, heads)
    refuse_unsupported(hf, {"head_dim": (None, found)}, str(hf.get("model_type")))
    return found


QUERY: Dim = ("heads", "q_per_kv", "head_dim")
KEY: Dim = ("kv_heads", "head_dim")


def linear(
    path: str,
    hf_name: str,
    outputs: Dim,
    inputs: Dim,
    bias: bool = False,
    transposed: bool = False,
    **how: Any,
) -> list[TensorName]:
    """Names of a projection's kernel and, where it has one, bias.

    Args:
        path: ours, without `/kernel`.
        hf_name: without `.weight`.
        transposed: the file's weight lies [inputs, outputs] (GPT-2's Conv1D).
        how: further fields of TensorName.
    """
    dims = (inputs, outputs) if transposed else (outputs, inputs)
    names = [TensorName(f"{path}/kernel", f"{hf_name}.weight", dims, **how)]
    if bias:
        vector = ("vector",) if outputs == ("embed",) else outputs
        names.append(TensorName(f"{path}/bias", f"{hf_name}.bias", (vector,), **how))
    return names


def norm(path: str, hf_name: str, bias: bool = False, axis: str = "vector") -> list[TensorName]:
    """Names of a norm's scale and, where it has one, bias."""
    names = [TensorName(f"{path}/scale", f"{hf_name}.weight", ((axis,),))]
    return names + ([TensorName(f"{path}/bias", f"{hf_name}.bias", ((axis,),))] if bias else [])
