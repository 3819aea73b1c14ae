import pytest

from quire.common.errors import ConfigError
from quire.config.lora import LoRAConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, 16), "max_loras=0: must be from 1 to 4096"),
        ((4097, 16), "max_loras=4097"),
        ((1, 0), "max_lora_rank=0: must be from 1 to 512"),
        ((1, 513), "max_lora_rank=513"),
        ((1, 1, 0), "lora_memory=0"),
    ],
)
def test_what_is_out_of_range_is_refused(fields: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoRAConfig(*fields)


def test_bounds_are_inclusive() -> None:
    assert LoRAConfig(4096, 512, 1) != LoRAConfig(1, 1)
