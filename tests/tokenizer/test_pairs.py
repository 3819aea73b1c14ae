"""Texts and pairs of texts, cut to a number of tokens as transformers cuts them."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from quire import InvalidPromptError
from quire.text.tokenizer.files import TokenizerFiles
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.made import EMBEDDED

WORDS = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{i}": 3 + i for i in range(40)}


def backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return made


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerFiles(backend(), {}, {}), "made")


@pytest.mark.parametrize("text", ["json.dumps writes it", "äöü äöü €uro \U0001f600\U0001f600 x", "  a   b  "])
def test_a_text_is_cut_between_characters(text: str) -> None:
    tokenizer = Tokenizer.from_path(EMBEDDED)
    token_ids = tokenizer.encode(text)
    for limit in range(1, len(token_ids) + 1):
        cut = tokenizer.cut(text, limit)
        assert text.startswith(cut)
        found = tokenizer.encode(cut)
        assert len(found) <= limit
        assert limit < len(token_ids) or cut == text
        assert token_ids[: len(found)] == found
    assert tokenizer.cut(text, 10**6) == text


def words(first: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


@pytest.mark.parametrize("max_tokens", [None, 1, 2, 3, 5, 9, 12, 30])
@pytest.mark.parametrize("num", [0, 1, 7, 20])
@pytest.mark.parametrize("cuts_start", [False, True])
def test_a_text_keeps_its_first_or_last_tokens_and_the_special_ones(
    tokenizer: Tokenizer, num: int, max_tokens: int | None, cuts_start: bool
) -> None:
    oracle = backend()
    if max_tokens is not None and max_tokens >= 2:
        oracle.enable_truncation(max_tokens, direction="left" if cuts_start else "right")
    expected = oracle.encode(words(0, num)).ids
    assert tokenizer.encode_cut(words(0, num), max_tokens, cuts_start=cuts_start) == expected[:max_tokens]
    bare = [3 + i for i in range(num)]
    kept = bare if max_tokens is None else bare[-max_tokens:] if cuts_start else bare[:max_tokens]
    assert tokenizer.encode_cut(words(0, num), max_tokens, False, cuts_start=cuts_start) == kept


@pytest.mark.parametrize("max_tokens", [None, 4, 5, 6, 9, 10, 15, 30])
@pytest.mark.parametrize(("num_first", "num_second"), [(1, 1), (3, 12), (12, 3), (9, 9), (8, 9), (0, 6)])
@pytest.mark.parametrize("cuts_start", [False, True])
def test_the_longer_text_of_a_pair_is_cut_first(
    tokenizer: Tokenizer, num_first: int, num_second: int, max_tokens: int | None, cuts_start: bool
) -> None:
    oracle = backend()
    if max_tokens is not None:
        oracle.enable_truncation(max_tokens, strategy="longest_first", direction="left" if cuts_start else "right")
    first, second = words(0, num_first), words(20, num_second)
    expected = oracle.encode(first, second)
    ids, types = tokenizer.encode_pair(first, second, max_tokens, cuts_start=cuts_start)
    assert (ids, types) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize("max_tokens", [5, 40])
def test_long_pairs_are_cut_in_a_time_that_grows_as_they_do(tokenizer: Tokenizer, max_tokens: int) -> None:
    """The library joins each piece of a text with each of the other: 40,000 by 40,000 here."""
    first, second = "w1 " * 200_000, "w2 " * 200_000
    ids, types = tokenizer.encode_pair(first, second, max_tokens)
    num = (max_tokens - 3) // 2
    assert ids == [0, *[4] * num, 1, *[5] * (max_tokens - 3 - num), 1]
    assert sum(types) == max_tokens - 3 - num + 1


def test_pairs_without_a_template_follow_each_other() -> None:
    made = backend()
    made.post_processor = None
    tokenizer = Tokenizer(TokenizerFiles(made, {}, {}), "made")
    assert tokenizer.encode_pair("w0 w1 w2", "w3 w4", 4) == tokenizer.encode_pair("w0 w1", "w3 w4", None)


def test_invalid_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="not valid Unicode"):
        tokenizer.encode_cut("a\ud800", None)
    with pytest.raises(InvalidPromptError, match="not valid Unicode"):
        tokenizer.encode_pair("a", "b\ud800", 4)
