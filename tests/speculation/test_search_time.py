"""How much time searches for drafts may take."""

from quire.engine.drafting.search_time import SearchTime


def test_nothing_is_searched_while_steps_are_too_short():
    search = SearchTime(shortest_step_s=4e-3)
    assert not search.is_left
    search.observe_steps(3e-3, num_steps=100, num_sequences=1)
    assert not search.is_left
    search.observe_steps(5e-3, num_steps=1, num_sequences=1)
    assert search.is_left


def test_before_the_first_step_a_search_may_start_and_nothing_is_saved():
    search = SearchTime()
    assert search.is_left
    search.observe_accepted(3)
    search.spend(0.0, 1)
    assert search.is_left


def test_steps_may_be_as_short_as_the_shortest():
    search = SearchTime(shortest_step_s=4e-3)
    search.observe_steps(4e-3, num_steps=1, num_sequences=1)
    assert search.is_left


def test_the_share_of_short_steps_is_short():
    search = SearchTime()
    search.observe_steps(0.1, num_steps=1, num_sequences=1)
    search.spend(0.05, 1)
    assert not search.is_left


def test_no_more_than_a_short_step_is_saved_up():
    search = SearchTime()
    search.observe_steps(0.1, num_steps=1000, num_sequences=1)
    search.spend(0.15, 1)
    assert not search.is_left


def test_a_right_draft_of_a_single_sequence_saves_half_a_step():
    search = SearchTime()
    search.observe_steps(1.0, num_steps=1, num_sequences=1)
    search.spend(0.4, 1)
    search.observe_accepted(1)
    assert search.is_left


def test_searches_that_save_nothing_take_a_hundredth_of_the_time():
    search = SearchTime()
    search.observe_steps(1.0, num_steps=1, num_sequences=1)
    search.spend(0.02, 1)
    assert not search.is_left
    search.observe_steps(1.0, num_steps=1, num_sequences=1)
    assert search.is_left
    search.spend(0.02, 1)
    search.observe_accepted(1)
    assert search.is_left


def test_time_is_scarce_where_a_search_for_each_sequence_takes_a_large_share_of_a_step():
    search = SearchTime()
    search.observe_steps(1.0, num_steps=1, num_sequences=4)
    assert not search.is_scarce(1000), "none has been timed"
    search.spend(0.06, 4)
    assert [search.is_scarce(num_sequences) for num_sequences in (1, 3, 4)] == [False, False, True]
    search.spend(0.0, 0)
    assert search.is_scarce(4), "a step in which all pause says nothing"
