"""How tokens are chosen, and when to stop."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from quire.common.errors import InvalidParamsError
from quire.common.params.checks import check_flag, check_ids, check_int, check_number, check_text, check_texts, refuse
from quire.common.params.structured_outputs import StructuredOutputsParams

OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final_only")
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
ALL_LOGPROBS = -1
_GREEDY_BELOW = 1e-5

_NUMBERS = (
    ("temperature", 0.0, 1e6, "0 for greedy, or a positive number up to 1e6"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("presence_penalty", -2.0, 2.0, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
    ("repetition_penalty", 0.01, 100.0, "0.01 to 100; 1 changes nothing"),
)
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop; names and defaults as in vLLM.

    Checked when made: a value out of range raises InvalidParamsError, which names the field, the value and the range.
    What only an engine can know (its vocabulary, its limits) is checked when the request is added. docs/sampling.md has
    all definitions and bounds in one table, and the order in which they are applied.
    """

    n: int = 1
    """samples of the answer; they share the prompt's blocks"""
    best_of: int | None = None
    """samples to run, of which the `n` likeliest come out, best first, at the end; None: `n`"""
    temperature: float = 1.0
    """0 takes the likeliest token (greedy); larger is more random"""
    top_p: float = 1.0
    """keep the likeliest tokens that together reach this probability"""
    top_k: int = 0
    """keep this many of the likeliest tokens; 0 or -1 keeps all"""
    min_p: float = 0.0
    """keep the tokens that are at least this times as likely as the likeliest"""
    presence_penalty: float = 0.0
    """taken off the logit of every token that is in the output"""
    frequency_penalty: float = 0.0
    """taken off the logit of a token, times how often it is in the output"""
    repetition_penalty: float = 1.0
    """logits of tokens in prompt or output are divided by it where they are positive, else multiplied"""
    seed: int | None = None
    """the same seed, prompt and params give the same tokens, alone or in any batch; None draws one from the engine's"""
    max_tokens: int | None = 16
    """tokens to generate at most; None: as many as the context has room for"""
    min_tokens: int = 0
    """tokens to generate before an end-of-sequence token, a stop token or a stop string may end the output"""
    stop: str | list[str] | None = None
    """strings that end the output; they are not part of it unless include_stop_str_in_output"""
    stop_token_ids: list[int] | None = None
    """token ids that end the output; the text leaves the last one out unless include_stop_str_in_output"""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """do not stop at the checkpoint's end-of-sequence tokens"""
    logprobs: int | None = None
    """log-probabilities of each token drawn and of so many of the likeliest; -1: of all, None: of none"""
    prompt_logprobs: int | None = None
    """the same of the prompt's tokens"""
    logit_bias: dict[int, float] | None = None
    """token id -> what is added to its logit"""
    bad_words: list[str] | None = None
    """words whose last token is not drawn after their others, with or without a space before them"""
    allowed_token_ids: list[int] | None = None
    """no other token is drawn"""
    logits_processors: list[Callable[[list[int], Any], Any]] | None = None
    """called in order with the output so far and the logits [vocab] float32, a tensor of its own; give the logits back.
    Offline only, and slow"""
    skip_special_tokens: bool = True
    """leave special tokens out of the text (they stay in token_ids)"""
    spaces_between_special_tokens: bool = True
    """where the tokenizer puts spaces between tokens, also between special ones"""
    detokenize: bool = True
    """make text; without it only token ids come out and stop strings are not allowed"""
    truncate_prompt_tokens: int | None = None
    """keep only so many tokens, the last, of a longer prompt; -1: as many as leave room for max_tokens"""
    cache_salt: str = ""
    """requests of different salts share no cached prefix; it may stand with the prompt instead"""
    structured_outputs: StructuredOutputsParams | None = None
    """the form that the output must have"""
    output_kind: OutputKind = "cumulative"
    """what comes out of a step that brought a token: all so far, what is new since the last time, or nothing before
    the end; `LLM.generate` gives the whole in any case"""
    priority: int = 0
    """smaller runs first, with the scheduling policy `priority`"""
    tenant: str = ""
    """whose request it is, for the scheduling policy `fair`"""

    def __post_init__(self) -> None:
        for name, low, high, allowed in _NUMBERS:
            check_number(name, getattr(self, name), low, high, allowed)
        check_number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", lowest_excluded=True)
        check_int("top_k", self.top_k, -1, None, "-1 or 0 for all tokens, or a count")
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED, MAX_SEED, "a 64-bit integer")
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

    def _check_samples(self) -> None:
        check_int("n", self.n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        if self.best_of is None:
            return
        check_int("best_of", self.best_of, self.n, MAX_SAMPLES, f"n={self.n} to {MAX_SAMPLES}, or None for n")
        if self.ranks_samples and self.is_greedy:
            raise InvalidParamsError(
                f"best_of={self.best_of} with temperature={self.temperature}: greedy samples are all the same; "
                "give a temperature, or leave best_of out"
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None, "at least 1, or None for what the context holds")
        most = "" if self.max_tokens is None else f" to max_tokens={self.max_tokens}"
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens, f"an integer from 0{most or ' on'}")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, ALL_LOGPROBS, None, "a count from 0 on, -1 for the whole vocabulary, or None")
        if (keep := self.truncate_prompt_tokens) is not None and (keep != -1 or isinstance(keep, bool)):
            check_int("truncate_prompt_tokens", keep, 1, None, "at least 1, -1 for what the context holds, or None")

    def _check_tokens(self) -> None:
        if self.bad_words is not None:
            check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_LEN)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidParamsError(
                    "allowed_token_ids is empty, nothing could be drawn: give ids, or None for all"
                )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise refuse("logit_bias", self.logit_bias, "a dict from token ids to numbers")
            check_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS)
            for token_id, bias in self.logit_bias.items():
                check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "-100 to 100")
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
            raise InvalidParamsError("stop strings are searched in the text, and detokenize=False makes none")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken: a temperature this close to 0 is 0."""
        return self.temperature < _GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Samples to run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """More samples run than come out."""
        return self.num_samples > self.n
