"""Named sets of rules, and rules files in YAML.

Not here: what a rule says (rules.py) and applying it to tensors (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, did_you_mean
from shardwise.partition.mesh import _ALIASES
from shardwise.partition.rules import ACTIVATIONS, DEFAULT_PARAMS, Override, Rules, Spec, axes_text

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
    kind = _kind(text)
    if kind == "folder":
        raise ConfigError(
            f"rules {text!r} is a folder; name a .yaml file in it, or one of {', '.join(PRESETS)}"
        )
    if not text.lower().endswith((".yaml", ".yml")) and kind != "file":
        raise ConfigError(
            f"no rules are named {text!r}; there are {', '.join(PRESETS)}, or name a .yaml file"
            f"{did_you_mean(text, PRESETS)}"
        )
    try:
        return _from_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None


def _kind(text: str) -> str:
    """`folder`, `file`, or nothing where there is none."""
    try:
        path = Path(text).expanduser()
        return "" if not text or not path.exists() else "folder" if path.is_dir() else "file"
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte
        return ""


def _from_yaml(text: str) -> Rules:
    content = _content(text)
    if not isinstance(content, dict):
        raise ConfigError(_FORM)
    for key in content:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; {_FORM}{did_you_mean(str(key), _KEYS)}")
    base = content.get("preset", "fsdp+tp")
    if base not in list(PRESETS):
        raise ConfigError(
            f"preset is {base!r}; there are {', '.join(PRESETS)}{did_you_mean(str(base), PRESETS)}"
        )
    overrides = content.get("overrides")
    overrides = [] if overrides is None else overrides
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError(f"overrides is {overrides!r}; give a list of REGEX=SPEC texts")
    params = {name: _axes(name, value) for name, value in _mapping(content, "params").items()}
    activations = {name: _spec(name, value) for name, value in _mapping(content, "activations").items()}
    policy = _mapping(content, "policy")
    if not ("preset" in content or params or activations or policy or overrides):
        raise ConfigError(f"it says nothing, so that it has no effect; {_FORM}")
    return PRESETS[base].changed(
        params, activations, policy, [Override.parse(text) for text in overrides], name=Path(text).name
    )


def _content(text: str) -> Any:
    """What a YAML file holds; a key that stands twice, of which YAML would keep the last, is refused."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(text).expanduser().read_text(encoding="utf-8"))
        root = loader.get_single_node()
        inner = [value for _, value in root.value] if isinstance(root, yaml.MappingNode) else []
        for node in (root, *inner):
            if isinstance(node, yaml.MappingNode):
                _refuse_twice((key.value, key.start_mark.line + 1) for key, _ in node.value)
        return None if root is None else loader.construct_document(root)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError, yaml.YAMLError) as error:  # also bad dates, no such user, deep nesting
        raise ConfigError(f"cannot be read: {' '.join(str(error).split())}") from None


def _refuse_twice(keys: Iterable[tuple[Any, int]]) -> None:
    found: dict[str, int] = {}
    for key, line in keys:
        if str(key) in found:
            raise ConfigError(
                f"key {key!r} stands in line {found[str(key)]} and again in line {line}; keep one"
            )
        found[str(key)] = line


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key} is {value!r}; {_FORM}")
    return value


def _axes(name: str, value: Any) -> tuple[str, ...]:
    """Mesh axes as YAML has them: null, `tp`, or `[tp, fsdp]`."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} is {value!r}; give null, a mesh axis or a list of mesh axes")
    if any("," in item for item in items):
        names = [part.strip(" ()[]'") for item in items for part in item.split(",")]
        raise ConfigError(f"{name} is {value!r}; give a list of mesh axes, {axes_text(filter(None, names))}")
    return tuple(_ALIASES.get(item, item) for item in items)


def _spec(name: str, value: Any) -> Spec:
    if not isinstance(value, list):
        dims = ACTIVATIONS.get(name)
        form = f" ({', '.join(dims)}), such as [[dp, fsdp]{', null' * (len(dims) - 1)}]" if dims else ""
        raise ConfigError(f"activation {name} is {value!r}; give a list with an entry for each dim{form}")
    return tuple(_axes(name, item) for item in value)
