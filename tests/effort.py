"""How many examples hypothesis tries: all in `make test-all`, a quarter in `make test`."""

from hypothesis import HealthCheck, settings

_ALL, _QUICK, _LEAST = 100, 25, 10


def register_profiles(*, derandomize: bool) -> None:
    """The profiles `quick` and `all`, for `--hypothesis-profile`. How long an example takes says more about what else
    the machine does than about the test, so neither has a time limit."""
    for name, max_examples in {"quick": _QUICK, "all": _ALL}.items():
        settings.register_profile(
            name,
            max_examples=max_examples,
            derandomize=derandomize,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )


def examples(num: int) -> int:
    """`num` in the profile `all`; in the other a share of them, but not fewer than ten where there are as many."""
    return max(min(num, _LEAST), num * settings.default.max_examples // _ALL)
