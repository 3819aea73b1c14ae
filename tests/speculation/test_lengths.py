"""How many drafts a step verifies, and what rows cost."""

import itertools
import math
import operator
import random

import pytest

from quire.common.batch import Correction
from quire.engine.drafting.lengths import best_lengths, first_lengths, least_odds
from quire.engine.drafting.row_times import RowTimes
from quire.engine.drafting.search_time import SearchTime
from quire.engine.drafting.trust import Calibration, Trust


def test_drafts_that_cost_nothing_are_all_verified() -> None:
    assert best_lengths([[0.5, 0.5], [0.1]], 2, lambda n: 1.0, 8) == [2, 1]
    assert best_lengths([[0.5, 0.5], [0.1]], 2, lambda n: 1.0, 2) == [2, 0], "those that raise a speed most first"
    assert best_lengths([], 2, lambda n: 1.0, 8) == []


def test_drafts_are_verified_while_they_make_tokens_cheaper() -> None:
    def seconds(n: int) -> float:
        return 1.0 + 0.3 * n

    assert best_lengths([[0.9] * 8], 1, seconds, 8) == [5]
    assert best_lengths([[0.25] * 8], 1, seconds, 8) == [0]
    assert best_lengths([[0.5]], 1, lambda n: 1.0 + 0.5 * n, 8) == [0], "where they change nothing, none"
    assert best_lengths([[0.25] * 8, [0.9]], 2, seconds, 8) == [0, 1]


def test_the_number_with_the_best_rate_is_found_where_time_grows_by_steps() -> None:
    def seconds(n: int) -> float:
        return 1.0 if n < 1 else 1.9 if n < 9 else 2.5

    assert best_lengths([[0.95] * 9], 1, seconds, 9) == [8]


@pytest.mark.parametrize("slope", [0.01, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_the_number_with_the_best_geometric_mean_of_speeds_is_found(slope: float) -> None:
    rows = [[0.6], [0.5, 0.9], [0.3], []]
    chosen = best_lengths(rows, 4, lambda n: 1.0 + slope * n, 8)

    def speeds(lengths: tuple[int, ...]) -> float:
        expected = [
            1.0 + sum(itertools.accumulate(odds[:n], operator.mul)) for odds, n in zip(rows, lengths, strict=True)
        ]
        return math.prod(expected) / (1.0 + slope * sum(lengths)) ** 4

    assert speeds(tuple(chosen)) == max(map(speeds, itertools.product((0, 1), (0, 1, 2), (0, 1), (0,))))


def test_a_text_that_is_hard_to_foresee_gets_drafts_beside_one_that_is_easy() -> None:
    assert best_lengths([[0.9] * 8, [0.4]], 2, lambda n: 1.0 + 0.05 * n, 4) == [3, 1]


def test_a_fixed_number_is_cut_where_rows_end() -> None:
    assert first_lengths([3, 0, 4, 2], 5) == [3, 0, 2, 0]


def test_the_least_odds_are_what_a_row_costs() -> None:
    assert least_odds(1, 1, lambda n: 1.0 + 0.1 * n) == pytest.approx(0.1)
    assert least_odds(8, 8, lambda n: 8.0 + n) == pytest.approx(1.0)
    assert least_odds(8, 8, lambda n: 1.0 if n != 1 else 1.5) == 0.0, "eight rows cost nothing"
    assert least_odds(2, 2, lambda n: 1.0 - 0.01 * n) == 0.0
    assert least_odds(4, 4, lambda n: 1.0 + 0.01 * n**2) == pytest.approx(0.04), "one alone"
    assert least_odds(4, 4, lambda n: 1.0 + 0.1 * n**0.5) == pytest.approx(0.2), "four together"


def test_odds_that_say_too_little_are_corrected_too() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe((0.5, 0.5), 2)
    assert trust.factor == pytest.approx(42 / 22)
    for _ in range(200):
        trust.observe((0.25,), 1)
    assert trust.factor == 2.0, "at most"
    wrong = Trust()
    for each in (trust, wrong):
        each.observe((1.0,) * 2, 0)
    assert wrong.factor < 1.0 < trust.factor


def test_what_was_learned_of_a_sequence_is_forgotten_slowly() -> None:
    trust = Trust()
    trust.observe((0.5, 0.25, 0.25), 1)
    assert (trust.accepted, trust.expected) == (1.0, 0.75)
    trust.decay()
    assert (trust.accepted, trust.expected) == pytest.approx((0.98, 0.98 * 0.75))


def test_odds_are_corrected_by_range() -> None:
    calibration = Calibration()
    calibration.observe((0.6, 0.6, 0.3, 0.9), 2)
    assert calibration.correction == Correction(), "until it is updated"
    calibration.update()
    factor = (2 + 2) / (1.5 + 2)
    high, low = (2 - factor * 1.2) / (2 + 4), (0 - factor * 0.3) / (1 + 4)
    assert calibration.correction.factor == pytest.approx(factor)
    assert calibration.correction.shifts == pytest.approx((0, 0, low, 0, high, 0, 0, 0))
    for odds, shift in ((0.1, 0.0), (0.25, low), (0.374, low), (0.376, 0.0), (0.6, high), (0.7, 0.0)):
        assert calibration.correction.of(odds) == pytest.approx(factor * odds + shift)
    assert calibration.correction.of(1.0) == 1.0


def test_what_is_said_of_odds_follows_what_comes_true_however_odd() -> None:
    """A draft model that says 0.1 of what is always right, and 0.4 of what is as often wrong."""
    calibration = Calibration()
    for number in range(400):
        calibration.observe((0.1, 0.4), 1 + number % 2)
        calibration.update()
    assert calibration.correction.of(0.1) == pytest.approx(1.0, abs=0.05)
    assert calibration.correction.of(0.4) == pytest.approx(0.5, abs=0.05)


def test_what_was_learned_of_all_sequences_is_forgotten_more_slowly() -> None:
    calibration = Calibration()
    calibration.observe((1.0,), 0)
    for num_updates in range(3):
        calibration.update()
        share = 0.998**num_updates
        factor = 2 / (share + 2)
        assert calibration.correction.factor == pytest.approx(factor)
        assert calibration.correction.shifts == pytest.approx((*[0] * 7, -factor * share / (share + 4)))


def test_a_correction_is_a_probability() -> None:
    assert Correction(2.0, (0.0, 0.5), 0.5).of(0.9) == 0.5, "what is certain of any sequence is not of this one"
    assert Correction(2.0, (0.0,), 2.0).of(0.3) == 1.0
    assert Correction(1.0, (-0.5, 0.0), 2.0).of(0.4) == 0.0
    assert Correction().of(0.3) == 0.3


def test_nothing_is_known_at_first_but_that_rows_cost_little() -> None:
    times = RowTimes()
    assert 1.0 < times.shape(9) / times.shape(1) < 2.0


def test_the_pace_follows_the_machine_and_one_slow_step_little() -> None:
    times = RowTimes()
    assert times.pace == 0
    times.observe(1, 0.02)
    assert (times.pace, times.shape(1)) == (0.02, 1.0)
    times.observe(1, 0.022)
    assert times.pace == pytest.approx(0.0204)
    assert times.shape(1) == 1.0, "the same rows again say nothing about their shape"
    times.observe(1, 10.0)
    assert times.pace == pytest.approx(0.0204 * 1.1)
    times.observe(1, 1e-9)
    assert times.pace == pytest.approx(0.0204 * 1.1 * (1 - 0.2 / 3))


def test_times_between_and_beyond_those_that_are_known_lie_on_lines() -> None:
    times = RowTimes()
    assert [times.shape(rows) for rows in (1, 2, 11)] == pytest.approx([1.0, 1.02, 1.2])
    times._rows, times._shape = [4, 8], [2.0, 4.0]
    assert [times.shape(rows) for rows in (4, 5, 7, 8)] == pytest.approx([2.0, 2.5, 3.5, 4.0])
    assert times.shape(10) == pytest.approx(5.0), "as it grew before"
    assert times.shape(1) == pytest.approx(2.0 / 1.06), "as nothing is known of fewer"
    times._shape = [2.0, 2.0]
    assert times.shape(10) == pytest.approx(2.0 + 2 * 0.02 * 2.0 / 1.06), "but no less than nothing is known"
    times._rows, times._shape = [4], [2.0]
    assert times.shape(6) == pytest.approx(2.0 + 2 * 0.02 * 2.0 / 1.06)


def test_times_of_fewer_rows_and_of_many_more_follow_those_that_are_known() -> None:
    times = RowTimes()
    times._rows, times._shape = [4, 8, 16], [2.0, 4.0, 6.0]
    assert times.shape(2) == pytest.approx(2.0 * 1.02 / 1.06)
    assert times.shape(28) == pytest.approx(10.0), "by the line from the fewest to the most"


def test_the_first_observations_of_a_number_of_rows_count_more_than_later_ones() -> None:
    times = RowTimes()
    for rows, seconds in ((1, 1.0), (2, 1.02), (1, 1.3)):
        times.observe(rows, seconds)
    assert (times.shape(1), times.pace) == pytest.approx((1.0 + 0.3 / 3, 1.06))
    times.observe(2, 1.02 * 1.06 * 1.3)
    times.observe(1, 1.1 * times.pace * 1.3)
    assert times.shape(1) == pytest.approx(1.1 * (1.0 + 0.3 / 4))


def test_the_pace_is_that_of_the_first_step_whatever_its_rows() -> None:
    times = RowTimes()
    times.observe(11, 0.03)
    assert (times.pace, times.shape(11)) == pytest.approx((0.025, 1.2))


def test_a_number_of_rows_is_forgotten_after_128_steps_without_it() -> None:
    """That is looked at every 128 steps."""
    times = RowTimes()
    for step in range(1, 256):
        times.observe({128: 6, 129: 9}.get(step, 1), 1.0)
    assert times._rows == [1, 6, 9]
    times.observe(1, 1.0)
    assert times._rows == [1, 9]
    assert [len(column) for column in times._columns] == [2] * 4


def learned(seconds, steps: list[int]) -> RowTimes:
    times = RowTimes()
    for rows in steps:
        times.observe(rows, seconds(rows))
    return times


def test_times_of_rows_are_learned_with_their_steps() -> None:
    def seconds(rows: int) -> float:
        return 0.02 if rows <= 4 else 0.03 if rows <= 8 else 0.003 * rows

    times = learned(seconds, [1, 2, 4, 5, 8, 16, 32] * 40)
    for rows in (2, 4, 5, 8, 16, 32):
        assert times.shape(rows) / times.shape(1) == pytest.approx(seconds(rows) / seconds(1), rel=0.02)
    assert times.shape(24) / times.shape(1) == pytest.approx(72 / 20, rel=0.02), "between its neighbours"
    assert times.shape(64) > times.shape(32)
    assert times.shape(3) / times.shape(1) == pytest.approx(1, rel=0.02)


def test_the_pace_of_the_machine_changes_no_ratio() -> None:
    times = learned(lambda rows: 0.01 + 0.001 * rows, [1, 8] * 40)
    before = times.shape(8) / times.shape(1)
    for rows in [1] * 30 + [1, 8] * 10:
        times.observe(rows, 3 * (0.01 + 0.001 * rows))
    assert times.shape(8) / times.shape(1) == pytest.approx(before, rel=0.15)


def test_a_step_that_was_interrupted_counts_little() -> None:
    times = learned(lambda rows: 0.01, [1, 4] * 40)
    times.observe(4, 10.0)
    assert times.shape(4) / times.shape(1) < 1.35


def test_numbers_of_rows_that_do_not_come_again_are_forgotten() -> None:
    times = learned(lambda rows: 0.01 if rows == 1 else 0.09, [1, 6] * 5)
    assert times.shape(6) / times.shape(1) > 2
    for _ in range(1100):
        times.observe(1, 0.01)
    assert times.shape(6) / times.shape(1) < 1.5


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (1025, 1.0), (4, 0.0), (4, -1.0)])
def test_what_says_nothing_is_not_learned(rows: int, seconds: float) -> None:
    times = RowTimes()
    times.observe(rows, seconds)
    assert times.shape(4) == RowTimes().shape(4)
    assert times.pace == 0


def test_the_most_rows_of_a_step_are_learned_too() -> None:
    times = RowTimes()
    times.observe(1024, 1.0)
    assert times.pace > 0


def test_the_unit_stays_that_of_one_row_however_long_an_engine_runs() -> None:
    """Differences between steps of the same kind moved shape and pace apart: after some weeks to no numbers."""
    times, rng = RowTimes(), random.Random(1)
    for _ in range(60_000):
        rows = rng.choice((1, 2, 4, 8))
        times.observe(rows, (0.005 + 0.001 * rows) * math.exp(rng.gauss(0.0, 0.5)))
    assert times.shape(1) == pytest.approx(1.0, rel=0.3)
    assert times.pace == pytest.approx(0.006, rel=0.7)
    assert 1.2 < times.shape(8) / times.shape(1) < 4.0


@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_numbers_of_rows_that_are_chosen_have_gaps_that_grow(num_rows: int) -> None:
    def chosen(most: int, num_rows: int | None) -> int:
        return sum(best_lengths([[1.0] * 200], 1, lambda n: 1.0, most, num_rows))

    rows = {num_rows + chosen(most, num_rows) for most in range(201)}
    grid = {*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16), 128, 160, 192}
    assert rows == {each for each in grid if num_rows <= each <= num_rows + 200}
    assert [chosen(most, None) for most in range(201)] == [*range(201)], "of a step that is not recorded, any"


def test_the_best_number_is_found_among_the_rows_that_are_chosen() -> None:
    assert best_lengths([[0.9] * 8], 1, lambda n: 1.0 + 0.05 * n, 8, 3) == [7]
    assert best_lengths([[0.9] * 8], 1, lambda n: 1.0 + 0.05 * n, 8, 4) == [8], "of 6 and 8"
    assert best_lengths([[0.9]], 1, lambda n: 1.0, 8, 8) == [0], "one draft would make nine rows"


def test_searches_that_save_nothing_take_a_small_share_of_the_time() -> None:
    left, num_searches = SearchTime(), 0
    for _ in range(1000):
        if left.is_left:
            num_searches += 1
            left.spend(0.1, 1)
        left.observe_steps(1.0, 1, 4)
    assert 95 < num_searches < 105


def test_accepted_drafts_pay_for_searches() -> None:
    left = SearchTime()
    left.observe_steps(1.0, 1, 4)
    left.spend(0.2, 1)
    assert not left.is_left
    left.observe_accepted(1)
    assert not left.is_left
    left.observe_accepted(1)
    assert left.is_left


def test_one_step_is_the_most_that_is_saved_up_or_owed() -> None:
    left = SearchTime()
    left.observe_steps(1.0, 8, 1)
    left.observe_accepted(100)
    left.spend(0.9, 1)
    assert left.is_left
    left.spend(50.0, 1)
    left.observe_steps(1.0, 98, 1)
    assert not left.is_left
    left.observe_steps(1.0, 3, 1)
    assert left.is_left
