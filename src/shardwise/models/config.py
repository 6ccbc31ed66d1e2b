"""What a transformer is made of: sizes and options, as plain values.

Not here: how a Hugging Face config becomes one of these (families/), and padded sizes (partition/padding.py).
Imports neither JAX nor transformers, so that the command line can use it at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu"]
"""Non-linearities: x·σ(x); x·Φ(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415), its tanh approximation and
x·σ(1.702·x); max(x, 0)."""

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and its stretching to long contexts.

    Raises:
        ConfigError: a value that the kind cannot be computed with.
    """

    kind: RopeKind = "default"
    """`default`: as published.
    `linear`: positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    `dynamic`: theta grows with the document's length beyond `original_max_position` ("Dynamic NTK" in Peng et
    al. 2023, arXiv:2309.00071).
    `llama3`: only long wavelengths are stretched (Grattafiori et al. 2024, arXiv:2407.21783, and the code of
    Llama 3.1).
    `yarn`: wavelengths are stretched by how often they turn within the original context, and the attention's
    temperature changes (YaRN, the same paper).
    `longrope`: each wavelength has a searched factor, one for short and one for long documents (Ding et al.
    2024, arXiv:2402.13753; Phi-3)."""
    theta: float = 10000.0
    """Base of the geometric sequence of wavelengths."""
    factor: float = 1.0
    """By how much the context is stretched (all kinds but `default`); `longrope` makes only the default
    `attention_factor` of it."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above original_max_position / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below original_max_position / high_freq_factor stay as they are."""
    original_max_position: int = 8192
    """Context length, in tokens, before stretching (`dynamic`, `llama3`, `yarn`, `longrope`). For `dynamic`
    and `longrope` the longest document that is computed as before."""
    rotary_dim: int | None = None
    """How many features of a head turn, its first ones; None for all (GPT-J and GPT-NeoX turn a part)."""
    attention_factor: float | None = None
    """Multiplier of cosines and sines (`yarn`, `longrope`); None for the kind's own formula. What is
    used in the end is `attention_scaling`."""
    beta_fast: float = 32.0
    """`yarn`: wavelengths that turn more often than this within the original context stay as they are."""
    beta_slow: float = 1.0
    """`yarn`: wavelengths that turn less often than this are divided by `factor`."""
    mscale: float = 0.0
    """`yarn`: weight of ln(factor) in the numerator of the attention factor (DeepSeek-V2, arXiv:2405.04434);
    of effect only where `mscale_all_dim` is given too. 0: not given."""
    mscale_all_dim: float = 0.0
    """`yarn`: weight of ln(factor) in the denominator of the attention factor. 0: not given."""
    truncate: bool = True
    """`yarn`: the two bounds between which wavelengths are blended are rounded outwards to whole features."""
    short_factor: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency in documents of at most `original_max_position` tokens; one for
    each pair of features that turns."""
    long_factor: tuple[float, ...] = ()
    """`longrope`: the same for longer documents."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ConfigError(
                f"rope type {self.kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}"
            )
        for name, value in self._positive():
            if not 0 < value < math.inf:  # refuses NaN too
                raise ConfigError(f"rotary embedding: {name} is {value}; it must be a number above 0")
        width = self.rotary_dim
        if width is not None and (width < 2 or width % 2):
            raise ConfigError(f"rotary embedding: {width} features turn; it must be an even number above 0")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rotary embedding: low_freq_factor {self.low_freq_factor} must be below high_freq_factor"
                f" {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not (self.beta_slow <= self.beta_fast and self.theta > 1):
            raise ConfigError(
                "rotary embedding: rope type 'yarn' needs rope_theta above 1 and beta_slow at most beta_fast,"
                f" not rope_theta {self.theta}, beta_slow {self.beta_slow}, beta_fast {self.beta_fast}"
            )
        if self.kind == "longrope" and self.original_max_position < 2:
            raise ConfigError(
                "rotary embedding: rope type 'longrope' needs an original_max_position_embeddings of at least"
                f" 2, not {self.original_max_position}"
            )

    def _positive(self) -> list[tuple[str, float]]:
        """The numbers that must be above 0, by the names that config.json has for them."""
        found: list[tuple[str, float]] = [
            ("rope_theta", self.theta),
            ("factor", self.factor),
            ("original_max_position_embeddings", self.original_max_position),
        ]
        if self.kind == "llama3":
            found += [("low_freq_factor", self.low_freq_factor), ("high_freq_factor", self.high_freq_factor)]
        if self.attention_factor is not None:
            found.append(("attention_factor", self.attention_factor))
        if self.kind == "yarn":
            found += [("beta_fast", self.beta_fast), ("beta_slow", self.beta_slow)]
            given = (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim))
            found += [(name, value) for name, value in given if value != 0]
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                found += [(f"{name}[{i}]", value) for i, value in enumerate(getattr(self, name))]
        return found

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the document that they are used in."""
        return self.kind in ("dynamic", "longrope")

    @property
    def changes_at(self) -> int | None:
        """The one length at which a growing document's frequencies become others (`longrope`)."""
        return self.original_max_position + 1 if self.kind == "longrope" else None

    @property
    def changes_always(self) -> bool:
        """Whether every token that a document grows by may change its frequencies (`dynamic`)."""
        return self.kind == "dynamic"

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied with; scores of attention change by its square.

        Source: `yarn`: the root of 1/t in Peng et al. 2023, and DeepSeek-V2's ratio where both mscales are
        given; `longrope`: Ding et al. 2024, in the form of Phi-3's code.
        """
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        growth = math.log(self.factor)
        if self.kind == "longrope":
            return math.sqrt(1 + growth / math.log(self.original_max_position))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * growth + 1) / (0.1 * self.mscale_all_dim * growth + 1)
        return 0.1 * growth + 1

    def features(self, head_dim: int) -> int:
        """R: how many of a head's features turn.

        Raises:
            ConfigError: these settings do not fit a head of `head_dim` features.
        """
        width = head_dim if self.rotary_dim is None else self.rotary_dim
        if width > head_dim:
            raise ConfigError(f"rotary embedding: {width} features turn, but a head has only {head_dim}")
        if self.kind == "dynamic" and width == 2:
            raise ConfigError("rotary embedding: rope type 'dynamic' needs more than 2 features that turn")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != width // 2:
                raise ConfigError(
                    f"rotary embedding: {name} has {len(getattr(self, name))} numbers; it must have"
                    f" {width // 2}, one for each pair of the {width} features that turn"
                )
        return width


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
        for rope in self.ropes:
            if rope.features(self.head_dim) % 2:
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
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embeddings of layers that see all keys, and of those with a window where it is another."""
        if self.positions != "rotary":
            return ()
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

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
            "word_vector": self.word_dim or self.embed_dim,
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
