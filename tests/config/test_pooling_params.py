"""The values that parameters of pooling requests take, whatever the model, and those that a certain model takes."""

from typing import Any

import pytest

from quire import PoolingParams
from quire.common.errors import InvalidParamsError
from quire.common.params.pooling import PoolerInfo, PoolingTask

MODEL = PoolerInfo(("embed",), (), 512, dimensions=8, matryoshka=(2, 4))
CUT_ANYWHERE = PoolerInfo(("embed",), (), 512, dimensions=8, matryoshka=())
UNCUT = PoolerInfo(("embed",), (), 512, dimensions=8)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("task", ("embed", "token_embed", "classify", "token_classify", "score", None)),
        ("dimensions", (1, 2**20, None)),
        ("normalize", (True, False, None)),
        ("use_activation", (True, False, None)),
        ("truncate_prompt_tokens", (-1, 1, 2**40, None)),
        ("priority", (-(2**31), 0, 2**31)),
        ("tenant", ("", "a" * 256)),
        ("cache_salt", ("", "a" * 1024)),
    ],
)
def test_the_ends_of_a_range_are_in_it(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(PoolingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "task",
            "embedding",
            "task='embedding': must be one of embed, token_embed, classify, token_classify, score, or None",
        ),
        ("dimensions", 0, "dimensions=0: must be 1 to 1048576, or None for all"),
        ("dimensions", 2**20 + 1, "dimensions=1048577: must be 1 to 1048576, or None for all"),
        ("normalize", 1, "normalize=1: must be True or False"),
        ("use_activation", "yes", "use_activation='yes': must be True or False"),
        (
            "truncate_prompt_tokens",
            0,
            "truncate_prompt_tokens=0: must be at least 1, -1 for what the model takes, or None",
        ),
        (
            "truncate_prompt_tokens",
            -2,
            "truncate_prompt_tokens=-2: must be at least 1, -1 for what the model takes, or None",
        ),
        ("tenant", "a" * 257, "must be a Unicode string of at most 256 characters"),
        ("cache_salt", "a" * 1025, "must be a Unicode string of at most 1024 characters"),
    ],
)
def test_what_no_model_takes_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        PoolingParams(**{name: value})
    assert str(refused.value).startswith(f"{name}=")
    assert str(refused.value).endswith(message)


def test_a_priority_beyond_its_range_is_refused() -> None:
    for priority in (-(2**31) - 1, 2**31 + 1):
        with pytest.raises(InvalidParamsError, match=f"^priority={priority}: must be -2147483648 to 2147483648"):
            PoolingParams(priority=priority)


@pytest.mark.parametrize(
    ("model", "values"),
    [(MODEL, (None, 2, 4, 8)), (CUT_ANYWHERE, (None, 1, 7, 8)), (UNCUT, (None, 8))],
)
def test_embeddings_have_the_dimensions_that_the_model_allows(
    model: PoolerInfo, values: tuple[int | None, ...]
) -> None:
    for value in values:
        model.check_parameters(PoolingParams(dimensions=value), "embed")


@pytest.mark.parametrize(
    ("model", "given", "task", "message"),
    [
        (MODEL, {"dimensions": 3}, "embed", "dimensions=3: must be one of 2, 4, which this model was trained for"),
        (CUT_ANYWHERE, {"dimensions": 9}, "token_embed", "dimensions=9: must be 1 to 8"),
        (UNCUT, {"dimensions": 4}, "embed", "dimensions=4: must be 8: this model has no smaller ones"),
        (
            MODEL,
            {"dimensions": 4},
            "score",
            "dimensions=4: must be left out: it belongs to embeddings, and the task is 'score'",
        ),
        (
            MODEL,
            {"normalize": False},
            "classify",
            "normalize=False: must be left out: it belongs to embeddings, and the task is 'classify'",
        ),
    ],
)
def test_what_this_model_or_task_does_not_take_is_refused(
    model: PoolerInfo, given: dict[str, Any], task: PoolingTask, message: str
) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        model.check_parameters(PoolingParams(**given), task)
    assert str(refused.value) == message


@pytest.mark.parametrize("task", ["classify", "token_classify", "score"])
def test_classes_and_scores_have_an_activation_and_embeddings_a_length(task: PoolingTask) -> None:
    MODEL.check_parameters(PoolingParams(use_activation=True), task)
    for of_embeddings in ("embed", "token_embed"):
        MODEL.check_parameters(PoolingParams(normalize=True, use_activation=False, dimensions=4), of_embeddings)
