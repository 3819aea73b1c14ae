"""The tokenizer that users get does what transformers' does."""

from typing import Any

import pytest

from quire.common.errors import TokenizerError
from quire.text.tokenizer.callable_tokenizer import CallableTokenizer
from quire.text.tokenizer.tokenizer import Tokenizer

from .made import EMBEDDED

TEXTS = ["Hello, world!", "def f(x):\n    return x", "Ünïcode <|im_end|> 日本"]
CHAT = [{"role": "user", "content": "What does json.dumps do?"}]


@pytest.fixture(scope="module")
def theirs() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def ours() -> CallableTokenizer:
    return CallableTokenizer(Tokenizer.from_path(EMBEDDED))


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_and_decoded_alike(ours: CallableTokenizer, theirs: Any, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours(text)["input_ids"] == ours(text).input_ids == theirs(text)["input_ids"]
    assert ours(text).attention_mask == theirs(text)["attention_mask"]
    assert ours(text, truncation=True, max_length=3).input_ids == ids[:3]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.convert_ids_to_tokens(ids, skip) == theirs.convert_ids_to_tokens(ids, skip)
    assert ours.convert_tokens_to_ids(ours.tokenize(text)) == ids
    assert ours.decode(ids[0]) == theirs.decode(ids[0])


def test_several_texts_are_encoded_alike(ours: CallableTokenizer, theirs: Any) -> None:
    assert dict(ours(TEXTS)) == {name: theirs(TEXTS)[name] for name in ("input_ids", "attention_mask")}
    assert ours.batch_decode(ours(TEXTS).input_ids) == theirs.batch_decode(theirs(TEXTS)["input_ids"])
    with pytest.raises(AttributeError, match="an encoding has input_ids, attention_mask, and no 'offsets'"):
        _ = ours("a").offsets


@pytest.mark.parametrize(
    "name",
    ["eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token", "pad_token_id", "unk_token_id",
     "vocab_size", "chat_template", "is_fast"],
)  # fmt: skip
def test_attributes_are_alike(ours: CallableTokenizer, theirs: Any, name: str) -> None:
    assert getattr(ours, name) == getattr(theirs, name)


def test_the_vocabulary_is_alike(ours: CallableTokenizer, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert ours.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids("no such token")


@pytest.mark.parametrize(
    "options", [{}, {"tokenize": False}, {"add_generation_prompt": True}, {"return_dict": False}, {"tokenize": True}]
)
def test_a_chat_template_is_applied_alike(ours: CallableTokenizer, theirs: Any, options: dict[str, bool]) -> None:
    found, expected = ours.apply_chat_template(CHAT, **options), theirs.apply_chat_template(CHAT, **options)
    assert type(found) is type(expected) or dict(found) == {name: expected[name] for name in found}
    if not isinstance(found, dict):
        assert found == expected


def test_a_tokenizer_of_transformers_can_be_used(ours: CallableTokenizer, theirs: Any) -> None:
    made = Tokenizer.of(theirs)
    assert [made.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert made.eos_token_id == ours.eos_token_id
    assert made.apply_chat_template(CHAT) == ours.tokenizer.apply_chat_template(CHAT)
    assert Tokenizer.of(ours) is Tokenizer.of(ours.tokenizer) is ours.tokenizer
    assert Tokenizer.of(EMBEDDED).encode("a") == ours.encode("a")
    with pytest.raises(TokenizerError, match="must be a folder, one of Quire, or a fast one of transformers, not int"):
        Tokenizer.of(3)
