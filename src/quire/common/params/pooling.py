"""Parameters of a pooling request: which vectors or scores are made of a text, and what a model can make."""

from typing import Literal, get_args

import msgspec

from quire.common.params.base import Params
from quire.common.params.checks import check_flag, check_int, check_text, refuse
from quire.common.params.sampling import MAX_PRIORITY, MAX_SALT_LEN, MAX_TENANT_LEN

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
Side = Literal["left", "right"]
MAX_DIMENSIONS = 2**20
_EMBED = ("embed", "token_embed")


class PoolingParams(Params, kw_only=True, omit_defaults=True):
    """Parameters of a pooling request; names and meanings are vLLM's.

    The constructor raises InvalidParamsError for a value that no model takes. What depends on the model (its tasks, its
    dimensions) is checked when the request is added.
    """

    kind = "pooling"

    task: PoolingTask | None = None
    """What is made of the text: `embed` one vector, `token_embed` a vector for each token, `classify` the scores of the
    classes, `token_classify` those of each token, `score` one number for a pair of texts. None: the model's first."""
    dimensions: int | None = None
    """Keep this number of an embedding's first elements (Matryoshka representations); None for all."""
    normalize: bool | None = None
    """Whether embeddings are scaled to length 1; None for what the model was trained with."""
    use_activation: bool | None = None
    """Whether classes and scores go through the model's activation, such as softmax, which None does. Of embeddings the
    same as `normalize`, which counts where both are given."""
    truncate_prompt_tokens: int | None = None
    """Keep this number of tokens of a longer text: its first, with the special tokens at both ends. Of token ids the
    last are kept. -1 for the number that the model takes; None refuses longer texts."""
    truncation_side: Side | None = None
    """The end at which a longer text is cut: `left` keeps its last tokens. None: of texts the end that the checkpoint's
    tokenizer names, which mostly is the right one, and of token ids the left one."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Priority for the scheduling policy `priority`; smaller numbers run first."""
    tenant: str = ""
    """The tenant that the request belongs to, for the scheduling policy `fair`."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            raise refuse("task", self.task, f"one of {', '.join(POOLING_TASKS)}, or None")
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, MAX_DIMENSIONS, f"1 to {MAX_DIMENSIONS}, or None for all")
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if (keep := self.truncate_prompt_tokens) is not None and keep != -1:
            check_int("truncate_prompt_tokens", keep, 1, None, "at least 1, -1 for what the model takes, or None")
        if self.truncation_side not in (None, "left", "right"):
            raise refuse("truncation_side", self.truncation_side, "left, right, or None for the tokenizer's")
        check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
        check_text("tenant", self.tenant, MAX_TENANT_LEN)
        check_text("cache_salt", self.cache_salt, MAX_SALT_LEN)


class PoolerInfo(msgspec.Struct, frozen=True):
    """What a pooling model can make of a text."""

    tasks: tuple[PoolingTask, ...]
    whole_tasks: tuple[PoolingTask, ...]
    """Those that need the hidden states of all tokens, or all tasks of a model without a cache: their texts run whole,
    in a single step."""
    max_whole_tokens: int
    """Largest number of tokens of a text that runs whole."""
    dimensions: int | None = None
    """Number of elements of an embedding; None if the model makes none."""
    matryoshka: tuple[int, ...] | None = None
    """The smaller numbers of dimensions that may be asked for; none of them: any smaller number. None: no smaller
    number, since the model was not trained for that."""
    use_activation: bool | None = None
    """What holds for requests that leave it open; None: what the model was trained with."""

    def check_parameters(self, params: PoolingParams, task: PoolingTask) -> None:
        """Raise InvalidParamsError for a parameter that belongs to another task, or that this model does not allow."""
        for name in () if task in _EMBED else ("dimensions", "normalize"):
            if (value := getattr(params, name)) is not None:
                raise refuse(name, value, f"left out: it belongs to embeddings, and the task is {task!r}")
        if params.dimensions not in (None, self.dimensions):
            if self.matryoshka is None:
                raise refuse("dimensions", params.dimensions, f"{self.dimensions}: this model has no smaller ones")
            if self.matryoshka and params.dimensions not in self.matryoshka:
                listed = ", ".join(map(str, self.matryoshka))
                raise refuse("dimensions", params.dimensions, f"one of {listed}, which this model was trained for")
            check_int("dimensions", params.dimensions, 1, self.dimensions, f"1 to {self.dimensions}")
