"""What a transformer is made of: sizes and options, as plain values.

Not here: how a Hugging Face config becomes one of these (families/), and padded sizes (partition/padding.py).
Imports neither JAX nor transformers, so that the command line can use it at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu"]
"""Non-linearities: x·σ(x); x·Φ(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415), its tanh approximation and
x·σ(1.702·x); max(x, 0)."""

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
    """F: width of the feed-forward layer (of one expert, where there are several)."""
    max_position: int
    """Longest context, in tokens, that the checkpoint claims."""

    # What a layer looks like.
    norm: Literal["rms", "layer"] = "rms"
    """`rms`: root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467); `layer`: layer
    normalisation with a bias (Ba et al. 2016, arXiv:1607.06450)."""
    norm_eps: float = 1e-5
    """Added to the mean square or the variance."""
    norm_plus_one: bool = False
    """The stored scale of an RMS norm is what is added to 1 (Gemma)."""
    norm_order: Literal["pre", "post", "sandwich"] = "pre"
    """Where the norms of a layer stand: before each half; after each half's sum with the residual (the
    original Transformer, RoBERTa, OPT-350m); before and after each half, inside the sum (Gemma 2)."""
    parallel: Literal["no", "two_norms", "one_norm"] = "no"
    """Attention and feed-forward layer both read the layer's input, and their sum is added to it (GPT-J):
    each through a norm of its own (GPT-NeoX), or both through one (GPT-J)."""
    final_norm: bool = True
    """A norm after the last layer."""
    gated_mlp: bool = True
    """down(act(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202) instead of down(act(up(x)))."""
    activation: Activation = "silu"
    """Non-linearity of the feed-forward layer."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections (GPT-2, Qwen2)."""
    attention_out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases on the projections of the feed-forward layer."""

    # Positions and attention.
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    """`rotary`: queries and keys are turned (see `rope`); `learned`: a table is added to the embeddings
    (GPT-2); `alibi`: scores fall with the distance (Press et al. 2022, arXiv:2108.12409)."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of layers with a window, where it is another one (Gemma 3)."""
    position_offset: int = 0
    """Rows of the learned table before that of position 0 (OPT, RoBERTa); the table has max_position rows
    beside these."""
    windows: tuple[int, ...] = ()
    """For each layer how many keys, its own among them, a query sees at most (sliding window; Beltagy et al.
    2020, arXiv:2004.05150); 0: all of them. Empty: all layers see all."""
    causal: bool = True
    """Queries see no later keys; False in encoders (RoBERTa)."""
    qk_norm: bool = False
    """RMS norms on every head's query and key before they are turned (Dehghani et al. 2023,
    arXiv:2302.05442; Qwen3, Gemma 3)."""
    query_scalar: float | None = None
    """Scores are divided by the root of this; None takes head_dim (Gemma's query_pre_attn_scalar)."""
    attention_softcap: float | None = None
    """c of c·tanh(score / c), before masking (Gemma 2)."""

    # Both ends.
    head: Literal["vocab", "labels", "none"] = "vocab"
    """What follows the last layer: logits of every id; logits of `labels` from the first token (Devlin et al.
    2019, arXiv:1810.04805, §4.1); or nothing, as in a checkpoint of the base model alone. The options of the
    head over the vocabulary hold for `vocab` only."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, in order of their ids; empty without one."""
    tie_embeddings: bool = False
    """The output head is the embedding table."""
    head_bias: bool = False
    """Bias on the output head, as GPT-J and RoBERTa have; also where the head's matrix is tied."""
    head_transform: bool = False
    """The head sees norm(gelu(dense(x))) of the last hidden state x, whatever `activation` is (RoBERTa's
    masked-LM head, after BERT's)."""
    logit_softcap: float | None = None
    """c of c·tanh(logit / c) (Gemma 2)."""
    embed_norm: bool = False
    """A norm on the sum of all embeddings (BLOOM, RoBERTa)."""
    embed_scale: float = 1.0
    """What the looked-up embeddings are multiplied with, rounded to the compute dtype (Gemma: √D)."""
    word_dim: int = 0
    """Width of the embedding table and of the head where it is not D: a projection stands between (OPT-350m);
    0 for D."""
    token_types: int = 0
    """Rows of a table of token types, of which the first is added to every embedding (RoBERTa)."""

    # Experts.
    num_experts: int = 0
    """X: feed-forward layers of which each token takes some (Jiang et al. 2024, arXiv:2401.04088); 0: one
    layer for all tokens."""
    experts_per_token: int = 0
    """How many experts a token takes."""

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
        if self.head_dim % 2 and self.positions == "rotary":
            raise ConfigError(
                f"model config: head_dim is {self.head_dim}; rotary embedding needs an even one"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"model config: windows has {len(self.windows)} entries; give one for each of the"
                f" {self.num_layers} layers"
            )
        if self.parallel != "no" and self.norm_order != "pre":
            raise ConfigError(
                f"model config: parallel {self.parallel!r} goes with norm_order 'pre', not"
                f" {self.norm_order!r}"
            )
        if (self.head == "labels") != bool(self.labels):
            raise ConfigError(
                f"model config: head {self.head!r} with {len(self.labels)} labels; they go with head 'labels'"
            )
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model config: experts_per_token is {self.experts_per_token}; it must be between 1 and"
                f" num_experts, {self.num_experts}"
            )

    @property
    def q_per_kv(self) -> int:
        """G = H / K: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def word_axis(self) -> str:
        """Logical axis of the embedding table's second dim."""
        return "word_embed" if self.word_dim not in (0, self.embed_dim) else "embed"

    @property
    def head_path(self) -> str | None:
        """Path of the matrix [V, D] of the head over the vocabulary; None without one."""
        if self.head != "vocab":
            return None
        return "embed/table" if self.tie_embeddings else "lm_head/kernel"

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with: 1/√E (Vaswani et al. 2017, eq. 1), or by query_scalar."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def sizes(self) -> dict[str, int]:
        """True size of each logical axis that a parameter's dim can carry."""
        return {
            "layers": self.num_layers,
            "vocab": self.vocab_size,
            "embed": self.embed_dim,
            "word_embed": self.word_dim or self.embed_dim,
            "vector": self.embed_dim,
            "positions": self.max_position + self.position_offset,
            "token_types": self.token_types,
            "labels": len(self.labels),
            "experts": self.num_experts,
            "heads": self.num_kv_heads,
            "q_per_kv": self.q_per_kv,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "mlp": self.mlp_dim,
        }
