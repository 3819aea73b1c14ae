"""Stop strings are found as a plain search of the whole text would find them, wherever the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from quire.text.tokenizer.stop_strings import StopStrings

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


def first_to_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the occurrence that ends first; of several ending there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(pieces=st.lists(letters, max_size=6), stops=stop_lists)
def test_the_first_stop_string_to_end_is_found(pieces: list[str], stops: list[str]) -> None:
    automaton = StopStrings(tuple(stops))
    state, read = 0, 0
    for piece in pieces:
        state, num_read, found = automaton.read(state, piece)
        read += num_read
        if found is not None:
            assert (read, found) == first_to_end("".join(pieces), stops)
            return
    assert first_to_end("".join(pieces), stops) is None


@given(text=letters, stops=stop_lists)
def test_exactly_the_longest_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    automaton = StopStrings(tuple(stops))
    state, _, found = automaton.read(0, text)
    if found is None:
        possible = [n for n in range(len(text) + 1) for stop in stops if stop.startswith(text[len(text) - n :])]
        assert automaton.num_undecided(state) == max(possible)


def test_the_longest_of_many_stop_strings_is_found_behind_a_long_text() -> None:
    stops = tuple("a" * n + "b" for n in range(100, 164))
    _, num_read, found = StopStrings(stops).read(0, "a" * 200_000 + "b")
    assert (num_read, found) == (200_001, "a" * 163 + "b")
