"""What a decoder transformer is made of: sizes and options, as plain values.

Not here: how a Hugging Face config becomes one of these (families/), and padded sizes (partition/padding.py).
Imports neither JAX nor transformers, so that the command line can use it at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwise.errors import ConfigError

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
