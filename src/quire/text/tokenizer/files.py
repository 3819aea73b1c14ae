"""Reads a tokenizer's files: its vocabulary and model, special tokens and chat templates."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, processors

from quire.common.errors import RequestError, TokenizerError
from quire.config.checkpoint.sentence_transformers import read_sentence_config
from quire.config.hf_config import check_file, read_json_object
from quire.text.tokenizer.formats.backend import Built
from quire.text.tokenizer.formats.byte_level import WORDS, PreTokenizer, byte_level_bpe
from quire.text.tokenizer.formats.sentencepiece import is_sentencepiece, read_sentencepiece
from quire.text.tokenizer.formats.tiktoken import read_tekken, read_tiktoken

MAX_TEMPLATE_BYTES = 1024**2
_MAX_TOKENIZER_BYTES = 256 * 1024**2
_WHOLE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_MODELS = ("tokenizer.model", "spiece.model", "tiktoken.model")
"""Files of SentencePiece or tiktoken: some checkpoints have the one under the name of the other."""
_PRE_TOKENIZERS = {"Qwen2Tokenizer": PreTokenizer((WORDS % r"\p{N}",), composes=True)}
"""By tokenizer_class, for vocab.json and merges.txt."""
_HAVE_TOKEN_TYPES = ("Bert", "ConvBert", "Deberta", "DebertaV2", "Electra", "LayoutLM", "MobileBert", "SqueezeBert")
"""By tokenizer_class, without `Tokenizer`."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a checkpoint folder's tokenizer files."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """Maps roles to tokens, such as `eos_token` to `</s>`."""
    chat_templates: Mapping[str, str]
    """Maps names to Jinja sources; the usual name is `default`."""
    has_token_types: bool = True
    """Whether the model reads which text of a pair a token is of."""
    cuts_start: bool = False
    """Whether the model was made for the end of a text that is too long, not for its start."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read `tokenizer.json`, or else the vocabulary in another format, and the files beside it. Raises
    TokenizerError."""
    with library_errors(f"the tokenizer of {folder} cannot be read"):
        config = _read_config(folder)
        listed = _listed_tokens(folder, config)
        if (folder / _WHOLE).exists():
            built = _read_whole(folder / _WHOLE)
        else:
            built = _read_vocabulary(folder, config, {i: token for i, value in listed if (token := _content(value))})
        given = {role: token for role in _SPECIAL_TOKENS if (token := _content(config.get(role))) is not None}
        special_tokens = {**built.special_tokens, **given}
        _add_special_tokens(built.backend, folder, listed, [*special_tokens.values(), *_listed_special_tokens(config)])
        if not (folder / _WHOLE).exists():  # tokenizer.json itself says which tokens are put around a text
            adds_bos = config.get("add_bos_token")
            frame = {**config, "add_bos_token": built.adds_bos if adds_bos is None else adds_bos}
            frame_with_special_tokens(built.backend, frame, special_tokens)
        if read_sentence_config(folder).do_lower_case:
            _lower_texts(built.backend)
        templates = _read_chat_templates(folder, config)
        cuts_start = config.get("truncation_side", built.truncation_side) == "left"
        return TokenizerFiles(built.backend, special_tokens, templates, _has_token_types(config), cuts_start)


def _has_token_types(config: Mapping[str, Any]) -> bool:
    """Whether transformers 5 gives token types to a model with this tokenizer; true if its class is not stated."""
    names, kind = config.get("model_input_names"), config.get("tokenizer_class")
    if isinstance(names, list):
        return "token_type_ids" in names
    return not isinstance(kind, str) or kind.removesuffix("Fast").removesuffix("Tokenizer") in _HAVE_TOKEN_TYPES


def _lower_texts(backend: tokenizers.Tokenizer) -> None:
    """Let texts become lower case before all else."""
    steps = [normalizers.Lowercase(), *([] if backend.normalizer is None else [backend.normalizer])]
    backend.normalizer = normalizers.Sequence(steps)


def write_tokenizer_files(files: TokenizerFiles, folder: Path) -> None:
    """Write the files of which `read_tokenizer_files` makes the same."""
    files.backend.save(str(folder / _WHOLE))
    templates = [{"name": name, "template": template} for name, template in files.chat_templates.items()]
    config = {**files.special_tokens, "chat_template": templates}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


class library_errors:  # noqa: N801
    """A context that turns every exception into a TokenizerError; the library's panics are not subclasses of Exception.
    Not a generator, as `failures_named`."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, TokenizerError | RequestError | KeyboardInterrupt):
            raise TokenizerError(f"{self._what}: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    """Return special_tokens_map.json updated with tokenizer_config.json; both may be missing."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", _CONFIG):
        if (folder / name).exists():
            config |= read_json_object(folder / name)
    return config


def _read_whole(path: Path) -> Built:
    with library_errors(f"{path} cannot be read (is it incomplete?)"):
        check_file(path, _MAX_TOKENIZER_BYTES)
        backend = tokenizers.Tokenizer.from_file(str(path))
    side = (backend.truncation or {}).get("direction", "right")
    backend.no_truncation()
    backend.no_padding()
    return Built(backend, truncation_side=side)


def _read_vocabulary(folder: Path, config: Mapping[str, Any], added: Mapping[int, str]) -> Built:
    """Read the first of the other formats that the folder has. `added` maps the ids of added tokens to their texts."""
    if (tekken := folder / "tekken.json").exists():
        return read_tekken(tekken)
    for path in [*(folder / name for name in _MODELS), *sorted(folder.glob("*.tiktoken"))]:
        if path.exists():
            return (read_sentencepiece if is_sentencepiece(path) else read_tiktoken)(path, config, added)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.exists() and merges.exists():
        with library_errors(f"{vocab} cannot be read (is it incomplete?)"):
            return Built(_read_merges(vocab, merges, config))
    raise TokenizerError(
        f"{folder} has no tokenizer: neither tokenizer.json, nor tekken.json, {', '.join(_MODELS)}, *.tiktoken, or "
        "vocab.json with merges.txt was found. Give another folder or hub id with the argument `tokenizer`; a "
        "draft model must have one beside its weights"
    )


def _read_merges(vocab: Path, merges: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of GPT-2 (Radford et al. 2019), which OPT also uses, or of Qwen 2."""
    for path in (vocab, merges):
        check_file(path, _MAX_TOKENIZER_BYTES)
    ids, pairs = models.BPE.read_file(str(vocab), str(merges))
    pre = _PRE_TOKENIZERS.get(str(config.get("tokenizer_class")), PreTokenizer(()))
    return byte_level_bpe(ids, pairs, pre, bool(config.get("add_prefix_space", False)))


def _listed_tokens(folder: Path, config: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return the ids of added tokens in rising order, each with its text or an object that has it."""
    decoder = config.get("added_tokens_decoder")
    by_id = decoder if isinstance(decoder, dict) else {}
    listed = [(int(i), token) for i, token in by_id.items() if str(i).isdecimal()]
    if (folder / "added_tokens.json").exists():
        added = read_json_object(folder / "added_tokens.json")
        listed += [(i, token) for token, i in added.items() if isinstance(i, int)]
    return sorted(listed, key=lambda pair: pair[0])


def _add_special_tokens(
    backend: tokenizers.Tokenizer, folder: Path, listed: Sequence[tuple[int, Any]], special: Sequence[str]
) -> None:
    """Add the listed tokens to the backend, each under the id given in the files, and mark the special ones."""
    tokens = list[AddedToken]()
    for token_id, value in listed:
        token = _content(value)
        if token is None:
            raise TokenizerError(f"{folder}: the added token with id {token_id} has no text")
        tokens.append(_added_token(token, value if isinstance(value, dict) else {}))
    backend.add_tokens(tokens)  # at once, since each call goes through all added tokens
    for (token_id, _), added in zip(listed, tokens, strict=True):
        if backend.token_to_id(token := added.content) != token_id:
            raise TokenizerError(
                f"{folder}: the added token {token!r} should have id {token_id}, but the vocabulary gives it "
                f"{backend.token_to_id(token)}"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [token for token in special if token not in known and backend.token_to_id(token) is not None]
    backend.add_special_tokens([_added_token(token, {"special": True}) for token in new])


def _listed_special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _SPECIAL_TOKEN_LISTS:
        values = config.get(key) or []
        for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else []:
            token = _content(value)
            if token is not None:
                yield token


def _added_token(token: str, value: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
    return AddedToken(token, normalized=bool(value.get("normalized", not flags["special"])), **flags)


def frame_with_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Make the backend put the special tokens of add_bos_token and add_eos_token around each text."""
    bos, eos = (
        special_tokens.get(f"{role}_token") if config.get(f"add_{role}_token") else None for role in ("bos", "eos")
    )
    frame = [token for token in (bos, eos) if token is not None]
    for token in frame:
        if backend.token_to_id(token) is None:
            raise TokenizerError(f"the special token {token!r} must be added to texts but is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(frame)],
    )


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read templates; `chat_template.jinja` and `additional_chat_templates/*.jinja` override tokenizer_config.json."""
    value = config.get("chat_template") or []
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    templates = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise TokenizerError(
                    f"{folder}: 'chat_template' in tokenizer_config.json must be a string, or a list of objects with "
                    "'name' and 'template'"
                )
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read_template(folder / "chat_template.jinja")
    return templates


def _read_template(path: Path) -> str:
    with library_errors(f"{path} cannot be read"):
        check_file(path, MAX_TEMPLATE_BYTES)
        return path.read_text(encoding="utf-8")


def _content(value: Any) -> str | None:
    """Return the text of a token, which the files give as a string or as an object with flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
