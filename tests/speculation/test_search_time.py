"""How much time searches for drafts may take."""

from quire.engine.drafting.search_time import SearchTime


def test_nothing_is_searched_while_steps_are_too_short():
    search = SearchTime(shortest_step_s=4e-3)
    assert not search.is_left
    search.observe_steps(3e-3, num_steps=100, num_sequences=1)
    assert not search.is_left
    search.observe_steps(5e-3, num_steps=1, num_sequences=1)
    assert search.is_left


def test_searches_that_save_nothing_take_a_hundredth_of_the_time():
    search = SearchTime()
    search.observe_steps(1.0, num_steps=1, num_sequences=1)
    search.spend(0.02)
    assert not search.is_left
    search.observe_steps(1.0, num_steps=1, num_sequences=1)
    assert search.is_left
    search.spend(0.02)
    search.observe_accepted(1)
    assert search.is_left
