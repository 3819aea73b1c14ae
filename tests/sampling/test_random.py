"""Random numbers are part of what a seed promises: the same ones in every version and on every machine."""

import pytest

from quire.runner.sampling.random import random_key, uniform, uniform_bits


@pytest.mark.parametrize(
    ("seed", "index", "key", "bits"),
    [
        (0, 0, "463be1d58a72e9618ea59884367c4358", (7307476576739544, 1123069430784311, 5659136751126736)),
        (-1, 3, "9aebcce1be1886364badd6301a6bf6e3", (2333961501831058, 3671397232244014, 1645559720918991)),
        (2**63 - 1, 2, "e10fdb54a6fc6ec8b726a6e29c24193b", (8659749136390264, 2715146845070895, 5743646361589136)),
    ],
)
def test_a_seed_gives_the_same_numbers_for_ever(seed, index, key, bits):
    assert random_key(seed, index).hex() == key
    positions = (0, 1, 2**40)
    assert tuple(uniform_bits(random_key(seed, index), position) for position in positions) == bits
    assert [uniform(random_key(seed, index), position) for position in positions] == [n / 2**53 for n in bits]
