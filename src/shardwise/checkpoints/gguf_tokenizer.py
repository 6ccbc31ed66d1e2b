"""A transformers tokenizer from a GGUF file's metadata.

transformers' own conversion builds it; this file supplies what that leaves out: how some vocabularies split
text, where spaces go, special tokens spelled outside the byte alphabet, and the settings.
Not here: tokenizer files of a folder (`tokenizer`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoints.gguf_parser import read_metadata
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_REMEDY = (
    "put the file into a folder of its own together with the model's tokenizer.json and"
    " tokenizer_config.json, and name that folder"
)

# How a byte-level vocabulary cuts text before merging (tokenizer.ggml.pre), where transformers has no entry.
# Names and rules: llama.cpp, src/llama-vocab.cpp.
_DIGIT_WISE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion")
_SPLIT_IN_TURN = {"deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")}
_UNSTATED = (None, "default")
# Vocabularies in which a whole word that is a token is taken as it is, whatever the merges say. For the same
# ones llama.cpp adds the first token when the file does not say.
_WHOLE_WORDS = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)

# Vocabularies whose text is put into Unicode's composed form (NFC) first, as Qwen2Tokenizer does.
_COMPOSED = ("qwen2",)
# Architectures whose sentencepiece vocabularies have pieces of several spaces.
_SPACES_MERGE = ("gemma2", "gemma3")


def tokenizer_from_gguf(file: Path, metadata: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes.

    Args:
        file: the `.gguf` file.
        metadata: its metadata if they have been read already.

    Returns:
        A tokenizer with chat template and special tokens; saved and loaded again by AutoTokenizer it gives
        the same ids.

    Raises:
        CheckpointError: no tokenizer in the file, or one that cannot be reproduced.
    """
    metadata = _respelled(read_metadata(file) if metadata is None else metadata)
    if not metadata.get("tokenizer.ggml.tokens"):
        raise CheckpointError(f"{file}: has no tokenizer; {_REMEDY}")
    try:
        backend = _backend(file, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # transformers' conversion is internal and raises whatever its parts raise
        raise CheckpointError(f"{file}: its tokenizer cannot be built ({error}); {_REMEDY}") from error
    return _finish(file, backend, metadata)


def _respelled(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemma's tokens of spaces alone as its merges spell them.

    Converters write «▁▁» as two spaces and call it user-defined, so that llama.cpp takes it before it merges
    anything. In the original it is a piece that comes about by merging.
    """
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    if metadata.get("general.architecture") not in _SPACES_MERGE or not sentencepiece:
        return metadata
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    kinds = list(metadata.get("tokenizer.ggml.token_type") or ())
    for number, token in enumerate(tokens):
        if token and not token.strip(" "):
            tokens[number] = "▁" * len(token)
            if kinds:
                kinds[number] = _NORMAL
    return {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def _backend(file: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    described = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], described)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _set_byte_level_rules(file, backend, metadata.get("tokenizer.ggml.pre"))
    elif kind == "llama":
        _set_space_rules(backend, metadata.get("tokenizer.ggml.add_space_prefix", True))
    else:
        raise CheckpointError(
            f"{file}: tokenizer kind {kind!r} is not supported; supported: gpt2, llama; {_REMEDY}"
        )
    return _set_special_tokens(backend, metadata)


def _finish(file: Path, backend: Tokenizer, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    # This class keeps tokenizer.json as it is; a named one (LlamaTokenizer, …) rebuilds parts of it.
    from transformers import PreTrainedTokenizerFast

    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    # llama.cpp's defaults for sentencepiece; byte-level vocabularies have none that make sense.
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if sentencepiece else {}
    special: dict[str, str] = {}
    for key, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key))
        if number is not None:
            if not 0 <= number < len(tokens):
                raise CheckpointError(
                    f"{file}: the {key} token has id {number}, but there are {len(tokens)} tokens"
                )
            special[f"{name}_token"] = tokens[number]
    bos_by_default = sentencepiece or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    adds = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", bos_by_default)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name in ("bos", "eos"):
        if adds[f"add_{name}_token"] and f"{name}_token" not in special:
            raise CheckpointError(f"{file}: wants the {name} token added, but names none; {_REMEDY}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
        **adds,
    )
    _check_ids(file, tokenizer, metadata, set(special.values()))
    return tokenizer


def _check_ids(
    file: Path, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any], special: set[str]
) -> None:
    """Check that tokens matched whole have the file's ids: a new id would lie beyond the embedding table."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [None] * len(tokens)
    vocabulary = tokenizer.get_vocab()
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        whole = kind in (_CONTROL, _USER_DEFINED) or token in special
        if whole and vocabulary.get(token) != number and tokens.count(token) == 1:
            raise CheckpointError(
                f"{file}: token {token!r} would get id {vocabulary.get(token)}, not {number}; {_REMEDY}"
            )
    if vocabulary and max(vocabulary.values()) >= len(tokens):
        raise CheckpointError(
            f"{file}: the tokenizer would need more than its {len(tokens)} tokens; {_REMEDY}"
        )


def _set_byte_level_rules(file: Path, backend: Tokenizer, pre: str | None) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGIT_WISE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), as_gpt2]
        )
    elif pre in _SPLIT_IN_TURN:
        splits = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in _SPLIT_IN_TURN[pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    elif pre in _AS_GPT2 or pre in _UNSTATED:
        backend.pre_tokenizer = as_gpt2
        if pre in _UNSTATED:
            warnings.warn(
                f"{file} does not say how its tokenizer splits text; splitting as GPT-2 does", stacklevel=2
            )
    elif pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(f"{file}: splits text by {pre!r}, which is not supported; {_REMEDY}")
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()


def _set_space_rules(backend: Tokenizer, add_space_prefix: bool) -> None:
    """Sentencepiece's rule: one more space before each stretch of text, even one that starts with a space."""
    from tokenizers import decoders, normalizers

    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        plain.append(decoders.Strip(" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(plain)


def _set_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Control and user-defined tokens as the file has them, and no others.

    The conversion adds defaults of its tokenizer class (`<|endoftext|>` gets an id beyond Llama 3's table)
    and respells tokens outside the byte alphabet (`<｜User｜>`).
    """
    from tokenizers import AddedToken, Tokenizer

    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [None] * len(tokens)
    number_of = {token: number for number, token in enumerate(tokens)}
    whole = {token: kinds[n] for token, n in number_of.items() if kinds[n] in (_CONTROL, _USER_DEFINED)}
    known = backend.get_vocab()
    strange = [
        token.content
        for token in backend.get_added_tokens_decoder().values()
        if token.content not in number_of
    ]
    missing = [token for token in whole if known.get(token) != number_of[token]]
    if strange or missing:
        state = json.loads(backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in strange]
        vocabulary = state["model"]["vocab"]
        spelled = {number: token for token, number in vocabulary.items()}
        for token in missing:
            vocabulary.pop(spelled.get(number_of[token]), None)
            vocabulary[token] = number_of[token]
        backend = Tokenizer.from_str(json.dumps(state))
    for token in missing:
        control = whole[token] == _CONTROL
        added = AddedToken(token, normalized=False, special=control)
        (backend.add_special_tokens if control else backend.add_tokens)([added])
    return backend
