"""Named sets of rules, and rules files in YAML.

Not here: what a rule says (rules.py) and applying it to tensors (plan.py).
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.partition.mesh import _ALIASES
from shardwise.partition.rules import DEFAULT_PARAMS, Override, Rules, Spec

# The regular expressions of EasyLM's LLaMA (get_partition_rules), whose kernels lie [in, out]; ours lie
# [out…, in…]. Its head's rule is the `vocab` head layout.
_EASYLM = (
    "embed/table=tp,fsdp",
    "attn/q_proj/kernel=tp,None,None,fsdp",
    "attn/(k|v)_proj/kernel=tp,None,fsdp",
    "attn/o_proj/kernel=fsdp,tp,None,None",
    "mlp/(gate|up)_proj/kernel=tp,fsdp",
    "mlp/down_proj/kernel=fsdp,tp",
    "lm_head/kernel=tp,fsdp",
    ".*=whole",
)


def _only(name: str, *kept: str) -> Rules:
    params = {
        logical: tuple(axis for axis in axes if axis in kept) for logical, axes in DEFAULT_PARAMS.items()
    }
    return Rules(name).changed(params)


PRESETS: dict[str, Rules] = {
    "fsdp+tp": Rules(),
    "fsdp": _only("fsdp", "fsdp"),
    "tp": _only("tp", "tp"),
    "easylm": Rules("easylm").changed(overrides=[Override.parse(text) for text in _EASYLM]),
    "replicated": _only("replicated"),
}
"""`fsdp+tp` (the default): heads, mlp and vocabulary over tp, embed over fsdp. `fsdp`, `tp`: one of the two.
`easylm`: the regular expressions of EasyLM's LLaMA. `replicated`: parameters whole everywhere. All split the
batch over dp and fsdp."""

_KEYS = ("preset", "params", "activations", "policy", "overrides")
_FORM = (
    "a rules file is a mapping with any of preset, params (logical axis: mesh axes), activations (name: list"
    " of mesh axes a dim), policy (logical axis: pad, replicate or error), overrides (list of REGEX=SPEC)"
)


def load_rules(text: str) -> Rules:
    """The preset of this name, or the rules in this YAML file.

    Raises:
        ConfigError: neither is there; the file cannot be read or says something that rules cannot.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml") and not path.exists():
        near = get_close_matches(text, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no rules are named {text!r}; there are {', '.join(PRESETS)}, or name a .yaml file{hint}"
        )
    try:
        return _from_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None


def _from_yaml(path: Path) -> Rules:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(_FORM)
    for key in content:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown key {key!r}; {_FORM}{hint}")
    base = content.get("preset", "fsdp+tp")
    if base not in PRESETS:
        raise ConfigError(f"preset is {base!r}; there are {', '.join(PRESETS)}")
    overrides = content.get("overrides") or []
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError(f"overrides is {overrides!r}; give a list of REGEX=SPEC texts")
    params = {name: _axes(name, value) for name, value in _mapping(content, "params").items()}
    for name in params:
        if name not in DEFAULT_PARAMS:
            near = get_close_matches(name, DEFAULT_PARAMS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"params: no parameter has a logical axis {name!r}{hint}")
    activations = {name: _spec(name, value) for name, value in _mapping(content, "activations").items()}
    policy = _mapping(content, "policy")
    return PRESETS[base].changed(
        params, activations, policy, [Override.parse(text) for text in overrides], name=path.name
    )


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key} is {value!r}; {_FORM}")
    return value


def _axes(name: str, value: Any) -> tuple[str, ...]:
    """Mesh axes as YAML has them: null, `tp`, or `[tp, fsdp]`."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} is {value!r}; give null, a mesh axis or a list of mesh axes")
    return tuple(_ALIASES.get(item, item) for item in items)


def _spec(name: str, value: Any) -> Spec:
    if not isinstance(value, list):
        raise ConfigError(f"activation {name} is {value!r}; give a list with an entry for each dim")
    return tuple(_axes(name, item) for item in value)
