"""Byte-level vocabularies whose order is the order of merges: tiktoken's files and Mistral's tekken.json."""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from quire.common.errors import TokenizerError
from quire.config.hf_config import HFConfig, check_file, read_json_object
from quire.text.tokenizer.formats.backend import MAX_FILE_BYTES, Built, merges_by_rank
from quire.text.tokenizer.formats.byte_level import CL100K, KIMI, O200K, WORDS, PreTokenizer, byte_level_bpe, spelt

_MAX_RANK_DIGITS = 10
_MAX_SPECIAL = 2**16


@dataclass(frozen=True, slots=True)
class _Family:
    """What a tiktoken file does not hold: the pattern, and the special tokens by their distance from the last rank."""

    pre: PreTokenizer
    special: Mapping[str, int] = field(default_factory=dict)


_FIM = {"<|endoftext|>": 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20}
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
FAMILIES = {
    "cl100k_base": _Family(PreTokenizer((CL100K,), whole_words=True), _FIM),
    "o200k_base": _Family(PreTokenizer((O200K,), whole_words=True), {"<|endoftext|>": 1, "<|endofprompt|>": 20}),
    "qwen": _Family(
        PreTokenizer((WORDS % r"\p{N}",), whole_words=True, composes=True), {token: i for i, token in enumerate(_QWEN)}
    ),
    "TikTokenTokenizer": _Family(PreTokenizer((KIMI,), whole_words=True)),
}
"""By the name of the file, or by tokenizer_class in tokenizer_config.json. The last is Kimi's."""

_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of files that list none."""
_TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tiktoken(path: Path, config: Mapping[str, Any], added: Mapping[int, str]) -> Built:
    """Read a file of lines with a token in base64 and its rank, which is its id. `added` maps ids to further tokens.

    Raises TokenizerError for a malformed file, and if neither its name nor the config's class says how texts are cut.
    """
    family = FAMILIES.get(path.stem) or FAMILIES.get(str(config.get("tokenizer_class")))
    if family is None:
        raise TokenizerError(
            f"{path}: how a text is cut into words is known for files named, or with a tokenizer_class in "
            f"tokenizer_config.json of, {', '.join(FAMILIES)}, not for {str(config.get('tokenizer_class'))[:80]!r}. "
            "Give a folder or hub id with a tokenizer.json as the argument `tokenizer`"
        )
    check_file(path, MAX_FILE_BYTES)
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        token, _, rank = line.partition(b" ")
        if line and not (rank.isdigit() and len(rank) <= _MAX_RANK_DIGITS):
            raise TokenizerError(f"{path}: line {number} is {line[:80]!r}, but must be a token in base64 and its rank")
        if line:
            pairs.append((token, int(rank)))
    special = {len(pairs) + offset: token for token, offset in family.special.items()}
    backend = _backend(path, pairs, 0, special | dict(added), family.pre)
    backend.add_special_tokens([token for token in special.values() if backend.token_to_id(token) is not None])
    return Built(backend)


def read_tekken(path: Path) -> Built:
    """Read `tekken.json`: ids are those of the special tokens, then those of all others in the order of their ranks.

    Raises TokenizerError or CheckpointError for a malformed file.
    """
    whole = HFConfig(read_json_object(path, MAX_FILE_BYTES), str(path))
    config = whole.section("config") or HFConfig({}, f"{path}: config")
    num_special = config.size("default_num_special_tokens")
    num_tokens = config.size("default_vocab_size") - num_special
    vocabulary = whole.get("vocab")
    if not isinstance(vocabulary, list) or not 0 < num_tokens <= len(vocabulary) or num_special > _MAX_SPECIAL:
        raise TokenizerError(
            f"{path} promises {num_special} special tokens and {num_tokens} others: at most {_MAX_SPECIAL} special "
            "ones are allowed, and the list 'vocab' must have the others"
        )
    pairs = []
    for i, entry in enumerate(vocabulary[:num_tokens]):  # more may be listed than are used
        match entry:
            case {"rank": int(rank), "token_bytes": str(text)} if rank == i:
                pairs.append((text.encode(), rank))
            case _:
                raise TokenizerError(f"{path}: entry {i} of 'vocab' must have 'token_bytes' and the 'rank' {i}")
    special = _tekken_special(path, whole.get("special_tokens"), num_special)
    backend = _backend(path, pairs, num_special, special, PreTokenizer((config.text("pattern"),), whole_words=True))
    backend.add_special_tokens(list(special.values()))
    known = set(special.values())
    return Built(backend, {role: token for role, token in _TEKKEN_ROLES.items() if token in known}, adds_bos=True)


def _tekken_special(path: Path, listed: Any, num_special: int) -> dict[int, str]:
    """Return the special tokens by id. Ids without one are reserved, with a name of their own."""
    entries = [{"rank": i, "token_str": token} for i, token in enumerate(_TEKKEN_SPECIAL)] if listed is None else listed
    found: dict[int, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"rank": int(rank), "token_str": str(token)} if 0 <= rank < num_special and rank not in found:
                found[rank] = token
            case _:
                raise TokenizerError(
                    f"{path}: 'special_tokens' must be a list of objects with 'token_str' and a 'rank' of their own "
                    f"below {num_special}, not {str(entry)[:80]}"
                )
    every = {i: found.get(i, f"<SPECIAL_{i}>") for i in range(num_special)}
    if len(set(every.values())) != num_special:
        raise TokenizerError(f"{path}: a token appears twice in 'special_tokens'")
    return every


def _backend(
    path: Path, pairs: Iterable[tuple[bytes, int]], first_id: int, special: Mapping[int, str], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    """Return the tokenizer of tokens in base64 and their ranks, which become ids by adding `first_id`.

    A special token whose id is a rank's is left out; one that is spelt like another token takes its place.
    """
    ids: dict[str, int] = {}
    for encoded, rank in pairs:
        try:
            token = spelt(base64.b64decode(encoded, validate=True))
        except binascii.Error as error:
            raise TokenizerError(f"{path}: {encoded[:80]!r} is not a token in base64: {error}") from None
        if not token or token in ids:
            raise TokenizerError(f"{path}: the token {token[:40]!r} of rank {rank} is empty, or appears twice")
        ids[token] = first_id + rank
    taken = set(ids.values())
    missing = [byte for byte in range(256) if spelt(bytes([byte])) not in ids]
    if missing or len(taken) != len(ids):
        what = f"no token for the byte {missing[0]}" if missing else "two tokens of the same rank"
        raise TokenizerError(f"{path} has {what}: it must have all 256 bytes, and ranks of their own (is it complete?)")
    merges = merges_by_rank(ids, ids)
    ids |= {token: i for i, token in special.items() if i not in taken}
    return byte_level_bpe(ids, merges, pre)
