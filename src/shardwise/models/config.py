"""What a decoder transformer is made of: sizes and options, as plain values.

Not here: how a Hugging Face config becomes one of these (families/), and padded sizes (partition/padding.py).
Imports neither JAX nor transformers, so that the command line can use it at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and its stretching to long contexts."""

    kind: RopeKind = "default"
    """`default`; `linear` divides positions by `factor` (Chen et al. 2023, arXiv:2306.15595);
    `llama3` stretches low frequencies only (Llama 3.1)."""
    theta: float = 10000.0
    """Base of the geometric sequence of wavelengths."""
    factor: float = 1.0
    """By how much the context is stretched (`linear`, `llama3`)."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above original_max_position / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below original_max_position / high_freq_factor stay as they are."""
    original_max_position: int = 8192
    """`llama3`: the context length, in tokens, before stretching."""


@dataclass(frozen=True)
class ModelConfig:
    """True sizes and options of one model; immutable and hashable, so it can be a static argument of a jit.

    Sizes are those of the checkpoint. Padding for a mesh is the Plan's matter.
    """

    vocab_size: int
    """V: rows of the embedding table and columns of the head."""
    embed_dim: int
    """D: width of the residual stream."""
    num_layers: int
    """L."""
    num_heads: int
    """H: query heads."""
    num_kv_heads: int
    """K: key/value heads; H / K query heads share one (Ainslie et al. 2023, arXiv:2305.13245)."""
    head_dim: int
    """E: width of one head; need not be D / H."""
    mlp_dim: int
    """F: width of the gated feed-forward layer."""
    max_position: int
    """Longest context, in tokens, that the checkpoint claims."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding."""
    tie_embeddings: bool = False
    """The output head is the embedding table."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections (Qwen2)."""
    attention_out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases on the gate, up and down projections."""
    head_bias: bool = False
    """Bias on the output head, as GPT-J and RoBERTa have; also where the head's matrix is tied."""
    activation: Literal["silu", "gelu_tanh", "relu"] = "silu"
    """Non-linearity on the gate."""
    initializer_range: float = 0.02
    """Standard deviation of freshly drawn matrices and embeddings."""
    family: str = "llama"
    """Name of the family (families/) that reads and writes this model's checkpoints."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        for name in (*sizes, "max_position"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"model config: {name} is {value!r}; it must be a whole number of at least 1"
                )
        for name in ("norm_eps", "initializer_range"):
            if not 0 <= getattr(self, name) < math.inf:  # refuses NaN too
                raise ConfigError(
                    f"model config: {name} is {getattr(self, name)}; it must be a number of at least 0"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value"
                " heads; the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model config: head_dim is {self.head_dim}; rotary embedding needs an even one"
            )

    @property
    def q_per_kv(self) -> int:
        """G = H / K: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def sizes(self) -> dict[str, int]:
        """True size of each logical axis that a parameter's dim can carry."""
        return {
            "layers": self.num_layers,
            "vocab": self.vocab_size,
            "embed": self.embed_dim,
            "vector": self.embed_dim,
            "heads": self.num_kv_heads,
            "q_per_kv": self.q_per_kv,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "mlp": self.mlp_dim,
        }
