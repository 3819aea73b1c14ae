"""Parameters that say how tokens are sampled and when an output ends."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal

from quire.common.errors import InvalidParamsError
from quire.common.params.base import Params
from quire.common.params.checks import check_flag, check_ids, check_int, check_number, check_text, check_texts, refuse
from quire.common.params.structured_outputs import StructuredOutputsParams

OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final_only")


class RequestOutputKind(StrEnum):
    """Values of `SamplingParams.output_kind`, under vLLM's names."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


MAX_STOP_STRINGS = 1024
MAX_STOP_LEN = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_LEN = 16_384
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_PROCESSORS = 16
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 1024
MAX_PRIORITY = 2**31
MAX_TENANT_LEN = 256
MAX_SALT_LEN = 1024
MAX_PREDICTION_LEN = 2**22
ALL_LOGPROBS = -1
_GREEDY_BELOW = 1e-5

_NUMBERS = (
    ("temperature", 0.0, 1e6, "0 for greedy, or a positive number up to 1e6"),
    ("min_p", 0.0, 1.0, "from 0 to 1"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
    ("repetition_penalty", 0.01, 100.0, "from 0.01 to 100; 1 changes nothing"),
)
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


class SamplingParams(Params, kw_only=True):
    """Parameters that say how tokens are sampled and when an output ends; names and defaults are vLLM's.

    The constructor raises InvalidParamsError for a value out of range; the error names the field, value and range.
    What depends on the engine (its vocabulary, its limits) is checked when the request is added. docs/sampling.md lists
    all definitions and bounds, and the order in which they are applied.
    """

    kind = "sampling"

    n: int = 1
    """Number of outputs; they share the blocks of the prompt."""
    best_of: int | None = None
    """Number of samples to generate, of which the `n` likeliest are returned at the end, best first; None for `n`."""
    temperature: float = 1.0
    """0 always takes the likeliest token (greedy decoding); larger values are more random."""
    top_p: float = 1.0
    """Sample only among the likeliest tokens whose probabilities add up to this number."""
    top_k: int = 0
    """Sample only among this number of the likeliest tokens; 0 or -1 for all tokens."""
    min_p: float = 0.0
    """Sample only among tokens whose probability is at least this share of the likeliest token's."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit, times the number of times the token is in the output."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or output are divided by this number, negative ones multiplied by it."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens in any batch; None or -1 derives one from the
    engine's seed."""
    max_tokens: int | None = 16
    """Largest number of tokens to generate; None for the number that fits into the context."""
    min_tokens: int = 0
    """Number of tokens before an end-of-sequence token, a stop token or a stop string may end the output."""
    stop: str | list[str] | None = None
    """Strings that end the output; the text leaves them out unless include_stop_str_in_output."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output; the text leaves out the stop token unless include_stop_str_in_output."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """If True, the checkpoint's end-of-sequence tokens do not end the output."""
    logprobs: int | None = None
    """Return log-probabilities of each sampled token and of this number of the likeliest; -1 for all, None for none."""
    prompt_logprobs: int | None = None
    """Return the same log-probabilities for the tokens of the prompt."""
    logit_bias: dict[int, float] | None = None
    """Maps token ids to numbers that are added to their logits."""
    bad_words: list[str] | None = None
    """Words that must not be completed, with or without a space before them."""
    allowed_token_ids: list[int] | None = None
    """Sample only among these tokens."""
    logits_processors: list[Callable[..., Any]] | None = None
    """Functions called in order with the output so far and a copy of the logits ([vocab], float32); each returns the
    logits. One with three parameters gets the prompt's tokens first. They are slow, and available only with `LLM`."""
    extra_args: dict[str, Any] | None = None
    """What the classes given as `LLM(logits_processors=...)` read; Quire itself reads none of it."""
    skip_special_tokens: bool = True
    """If True, the text leaves out special tokens (token_ids keep them)."""
    spaces_between_special_tokens: bool = True
    """If the tokenizer puts spaces between tokens, put them between special tokens as well."""
    detokenize: bool = True
    """If False, no text is produced, only token ids, and stop strings are not allowed."""
    truncate_prompt_tokens: int | None = None
    """Keep only this number of tokens from the end of a longer prompt; -1 to leave space for max_tokens."""
    cache_salt: str = ""
    """Requests with different salts share no cached prefix. The salt may also be given with the prompt."""
    structured_outputs: StructuredOutputsParams | None = None
    """The structure that the output must have."""
    prediction: str | list[int] | None = None
    """What the output is expected to be, as text or token ids. Where it is right, several tokens are generated in one
    step; no token changes. With logits processors it has no effect."""
    output_kind: OutputKind = "cumulative"
    """What a step that adds a token returns: the whole output so far, the new part only, or nothing before the end.
    `LLM.generate` returns the whole output in every case."""
    priority: int = 0
    """Priority for the scheduling policy `priority`; smaller numbers run first."""
    tenant: str = ""
    """The tenant that the request belongs to, for the scheduling policy `fair`."""

    def __post_init__(self) -> None:
        for name, low, high, allowed in _NUMBERS:
            check_number(name, getattr(self, name), low, high, allowed)
        check_number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", lowest_excluded=True)
        check_int("top_k", self.top_k, -1, None, "-1 or 0 for all tokens, or a count")
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED, MAX_SEED, "a 64-bit integer")
            if self.seed == -1:
                self.seed = None
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_samples()
        self._check_lengths()
        self._check_tokens()
        self._check_stop()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise refuse("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        if self.output_kind not in OUTPUT_KINDS:
            raise refuse("output_kind", self.output_kind, f"one of {', '.join(OUTPUT_KINDS)}")
        check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, "a 32-bit integer")
        check_text("tenant", self.tenant, MAX_TENANT_LEN)
        check_text("cache_salt", self.cache_salt, MAX_SALT_LEN)
        if isinstance(self.prediction, str | None):
            if len(self.prediction or "") > MAX_PREDICTION_LEN:
                raise refuse("prediction", self.prediction, f"at most {MAX_PREDICTION_LEN:,} characters long")
        elif not isinstance(self.prediction, list | tuple):
            raise refuse("prediction", self.prediction, "text, or a list of token ids")
        else:
            check_ids("prediction", self.prediction, MAX_PREDICTION_LEN)

    def _check_samples(self) -> None:
        check_int("n", self.n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        if self.best_of is None:
            return
        check_int("best_of", self.best_of, self.n, MAX_SAMPLES, f"n={self.n} to {MAX_SAMPLES}, or None for n")
        if self.ranks_samples and self.is_greedy:
            raise InvalidParamsError(
                f"best_of={self.best_of} with temperature={self.temperature}: greedy samples are all the same; "
                "set a higher temperature, or leave out best_of"
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None, "at least 1, or None for the number that fits")
        allowed = "0 or more" if self.max_tokens is None else f"from 0 to max_tokens={self.max_tokens}"
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens, allowed)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, ALL_LOGPROBS, None, "0 or more, -1 for the whole vocabulary, or None")
        if (keep := self.truncate_prompt_tokens) is not None and (keep != -1 or isinstance(keep, bool)):
            check_int("truncate_prompt_tokens", keep, 1, None, "at least 1, -1 for the number that fits, or None")

    def _check_tokens(self) -> None:
        if self.bad_words is not None:
            check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_LEN)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidParamsError(
                    "allowed_token_ids is empty, so no token could be sampled: give ids, or None for all"
                )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise refuse("logit_bias", self.logit_bias, "a dict from token ids to numbers")
            check_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS)
            for token_id, bias in self.logit_bias.items():
                check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "-100 to 100")
        if not isinstance(self.extra_args, dict | None):
            raise refuse("extra_args", self.extra_args, "a dict for logits processors, or None")
        processors: Any = self.logits_processors or []
        if not isinstance(processors, list | tuple) or not all(map(callable, processors)):
            raise refuse("logits_processors", processors, "a list of functions of (token ids, logits)")
        if len(processors) > MAX_PROCESSORS:
            raise InvalidParamsError(f"logits_processors has {len(processors)}; at most {MAX_PROCESSORS} are allowed")

    def _check_stop(self) -> None:
        if self.stop_token_ids is not None:
            check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if strings is not None:
            check_texts("stop", strings, MAX_STOP_STRINGS, MAX_STOP_LEN)
        if strings and not self.detokenize:
            raise InvalidParamsError("stop strings need text, which detokenize=False turns off: remove one of them")

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Make parameters of values that may be None for the default. Only max_tokens=None keeps its meaning."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken; a temperature very close to 0 counts as 0."""
        return self.temperature < _GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Number of samples to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """Whether more samples are generated than returned."""
        return self.best_of is not None and self.best_of > self.n
