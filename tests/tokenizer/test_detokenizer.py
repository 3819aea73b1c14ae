"""Incremental text equals whole text, however tokens, characters and stop strings are cut."""

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tokenizer.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer.token_decoder import TokenDecoder
from quire.text.tokenizer.tokenizer import Tokenizer

from .made import EMBEDDED, byte_fallback, end_of_word, metaspace, word_piece
from .test_stop_strings import first_to_end


@functools.cache
def embedded() -> Tokenizer:
    return Tokenizer.from_path(EMBEDDED)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": embedded,
    "byte fallback": functools.cache(byte_fallback),
    "byte fallback, leading space kept": functools.cache(functools.partial(byte_fallback, strip=False)),
    "metaspace": functools.cache(metaspace),
    "metaspace, leading space kept": functools.cache(functools.partial(metaspace, "never")),
    "word piece": functools.cache(word_piece),
    "end of word": functools.cache(end_of_word),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def feed(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), **options: object) -> list[str]:
    """Stable texts after each token, and the final text; each must begin with the one before."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    texts = [detokenizer.stable_text(False)]
    for token_id in token_ids:
        assert detokenizer.append(token_id) is None
        texts.append(detokenizer.stable_text(False))
    texts.append(detokenizer.stable_text(True))
    assert detokenizer.text == texts[-1]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    return texts


def token_ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Also ids just past the vocabulary, which padded models draw."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)


@pytest.mark.essential
@every_kind
@given(data=st.data())
def test_final_text_is_the_whole_text_for_random_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    token_ids, skip = data.draw(token_ids_of(tokenizer)), data.draw(st.booleans())
    assert feed(tokenizer, token_ids, skip_special_tokens=skip)[-1] == tokenizer.decode(token_ids, skip)


@every_kind
@given(data=st.data())
def test_after_a_prompt_the_text_is_what_the_output_adds(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    prompt, output = data.draw(token_ids_of(tokenizer)), data.draw(token_ids_of(tokenizer))
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    if before and not before.endswith("\ufffd") and "\ufffd" not in whole:
        assert before + feed(tokenizer, output, prompt)[-1] == whole


@given(text=st.text(max_size=60))
def test_any_unicode_text_comes_back(text: str) -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert feed(tokenizer, token_ids, skip_special_tokens=False)[-1] == text


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "metaspace, leading space kept"])
@given(data=st.data())
def test_the_byte_table_decodes_as_the_library_does(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    token_ids, skip = data.draw(token_ids_of(tokenizer)), data.draw(st.booleans())
    assert tokenizer.decode(token_ids, skip) == tokenizer._backend.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(alphabet="abc é€😀Hello.", max_size=30), strip=st.booleans())
def test_byte_fallback_decodes_well_formed_text_as_the_library_does(text: str, strip: bool) -> None:
    tokenizer = byte_fallback(strip)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == tokenizer._backend.decode(token_ids)


def test_an_unfinished_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode("a😀b")
    assert len(token_ids) > 3, "the emoji must take several tokens for this test to say anything"
    texts = feed(tokenizer, token_ids)
    assert set(texts) == {"", "a", "a😀", "a😀b"}


def test_a_character_that_never_gets_finished_shows_only_at_the_end() -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode("a😀")[:-1]
    texts = feed(tokenizer, token_ids)
    assert [text for text in texts[:-1] if "\ufffd" in text] == []
    assert texts[-1] == tokenizer.decode(token_ids) == "a\ufffd"


def test_an_unfinished_character_of_the_prompt_is_completed_by_the_output() -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode("a😀b")
    assert feed(tokenizer, token_ids[2:], prompt=token_ids[:2])[-1] == "😀b"


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one() -> None:
    tokenizer = byte_fallback()
    hello = tokenizer.encode("Hello")
    assert feed(tokenizer, hello)[-1] == "Hello"
    assert feed(tokenizer, hello, prompt=tokenizer.encode("a"))[-1] == " Hello"
    assert feed(tokenizer, hello, prompt=[1])[-1] == "Hello", "a special token that is skipped is no text before it"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word piece", "end of word")])
@given(data=st.data())
def test_the_bytes_of_tokens_are_together_those_of_the_text_after_a_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    token_ids = data.draw(token_ids_of(tokenizer))
    text = feed(tokenizer, token_ids, prompt=tokenizer.encode("a"), skip_special_tokens=False)[-1]
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace") == text


@pytest.mark.parametrize(
    ("kind", "token", "expected"),
    [
        ("byte fallback", "<0xE2>", b"\xe2"),
        ("byte fallback", "▁Hello", b" Hello"),
        ("byte fallback", "</s>", b"</s>"),
        ("metaspace", "▁é", b" \xc3\xa9"),
        ("byte level", "ð", b"\xf0"),
        ("byte level", "<|im_end|>", b"<|im_end|>"),
        ("word piece", "é", b"\xc3\xa9"),
        ("end of word", "a</w>", b"a"),
    ],
)
def test_a_token_has_its_own_bytes(kind: str, token: str, expected: bytes) -> None:
    tokenizer = KINDS[kind]()
    assert tokenizer.token_bytes(tokenizer.vocabulary[token]) == expected


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = embedded()
    token_ids = [*tokenizer.encode("yes"), tokenizer.eos_token_id]
    assert feed(tokenizer, token_ids)[-1] == "yes"
    assert feed(tokenizer, token_ids, skip_special_tokens=False)[-1] == "yes<|im_end|>"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    """Other spaces stay; a byte table never has any between them."""
    tokenizer = KINDS["word piece"]()
    cat, bos, eos = (tokenizer._backend.token_to_id(token) for token in ("cat", "<s>", "</s>"))
    token_ids = [cat, bos, eos, bos, cat]
    options = {"skip_special_tokens": False}
    assert feed(tokenizer, token_ids, **options)[-1] == "cat <s> </s> <s> cat"
    texts = feed(tokenizer, token_ids, spaces_between_special_tokens=False, **options)
    assert texts[-1] == "cat <s></s><s> cat"
    skipped = feed(tokenizer, token_ids, spaces_between_special_tokens=False)
    assert skipped == feed(tokenizer, token_ids)


@settings(deadline=None)
@given(text=st.text("ab é😀", max_size=30), stop=st.lists(st.text("ab é😀", min_size=1, max_size=4), max_size=3),
       min_tokens=st.integers(0, 20))  # fmt: skip
def test_stop_strings_that_end_within_min_tokens_do_not_count(text: str, stop: list[str], min_tokens: int) -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=stop, min_tokens=min_tokens)
    stream = tokenizer.stream([])
    num_free = sum(len(stream.push(token_id)) for token_id in token_ids[:min_tokens])
    ends = [(end, -len(s), s) for s in stop for end in range(num_free + 1, len(text) + 1) if text[:end].endswith(s)]
    found, streamed = None, ""
    for token_id in token_ids:
        found = detokenizer.append(token_id)
        stable = detokenizer.stable_text(found is not None)
        assert stable.startswith(streamed)
        streamed = stable
        if found is not None:
            break
    assert found == (min(ends)[2] if ends else None)
    assert detokenizer.text == (text[: min(ends)[0] - len(found)] if ends else text)


@pytest.mark.parametrize("kind", ["byte level", "word piece"])
def test_no_token_is_decoded_again_and_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS[kind]()
    num_decoded = 0
    decode = TokenDecoder.decode

    def counting(self: TokenDecoder, token_ids: Sequence[int], skip: bool) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, skip)

    monkeypatch.setattr(TokenDecoder, "decode", counting)
    detokenizer = IncrementalDetokenizer(tokenizer, [3] * 1000)
    for _ in range(1000):
        detokenizer.append(5)
    assert num_decoded <= 20 * 1000


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(include: bool) -> None:
    tokenizer = embedded()
    token_ids = tokenizer.encode("The end is near.\nAnd more")
    detokenizer = IncrementalDetokenizer(
        tokenizer, [], stop=["never", "nd is ne", "nd is nice"], include_stop_str_in_output=include
    )
    found, streamed = None, ""
    for token_id in token_ids:
        found = detokenizer.append(token_id)
        text = detokenizer.stable_text(False)
        assert text.startswith(streamed)
        streamed = text
        if found:
            break
    assert found == "nd is ne"
    assert detokenizer.text == detokenizer.stable_text(True) == ("The end is ne" if include else "The e")
    with pytest.raises(AssertionError):
        detokenizer.append(token_ids[0])


@given(text=st.text("ab é😀", max_size=30), stop=st.lists(st.text("ab é😀", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_where_a_search_of_the_whole_text_says(text: str, stop: list[str]) -> None:
    tokenizer = embedded()
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=stop)
    found = next(filter(None, map(detokenizer.append, tokenizer.encode(text))), None)
    expected = first_to_end(text, stop)
    assert found == (None if expected is None else expected[1])
    assert detokenizer.text == (text if expected is None else text[: expected[0] - len(expected[1])])


def test_text_that_could_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    tokenizer = embedded()
    texts = feed(tokenizer, tokenizer.encode("abcx"), stop=["abcd"])
    assert texts[-2:] == ["abcx", "abcx"]
    assert set(texts[:-2]) == {""}
    assert feed(tokenizer, tokenizer.encode("xabc"), stop=["abcd"])[-2:] == ["x", "xabc"]
