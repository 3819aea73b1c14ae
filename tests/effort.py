"""How many examples hypothesis tries: all in `make test-all`, a quarter in `make test`."""

from hypothesis import settings

_ALL, _QUICK = 100, 25


def register_profiles(*, derandomize: bool) -> None:
    """The profiles `quick` and `all`, for `--hypothesis-profile`."""
    settings.register_profile("quick", max_examples=_QUICK, derandomize=derandomize)
    settings.register_profile("all", max_examples=_ALL, derandomize=derandomize)


def examples(num: int) -> int:
    """`num` in the profile `all`, and a share of them in others."""
    return max(1, num * settings.default.max_examples // _ALL)
