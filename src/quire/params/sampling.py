"""How tokens are chosen, and when to stop."""

import math
from typing import Literal

import msgspec

from quire.errors import InvalidParamsError
from quire.params.checks import check_int, check_number
from quire.params.structured_outputs import StructuredOutputsParams

OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final_only")
MAX_STOP_STRINGS = 64
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 1024
MAX_PRIORITY = 2**31
MAX_TENANT_LEN = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop; names and defaults as in vLLM.

    Checked when made: a value out of range raises InvalidParamsError, which names the field, the value and the range.
    """

    n: int = 1
    """samples of the answer; they share the prompt's blocks"""
    temperature: float = 1.0
    """0 takes the likeliest token (greedy); larger is more random"""
    top_p: float = 1.0
    """keep the likeliest tokens that together reach this probability"""
    top_k: int = 0
    """keep this many of the likeliest tokens; 0 or -1 keeps all"""
    seed: int | None = None
    """the same seed, prompt and params give the same tokens, alone or in any batch; None draws one from the engine's"""
    max_tokens: int | None = 16
    """tokens to generate at most; None: as many as the context has room for"""
    stop: str | list[str] | None = None
    """strings that end the output; they are not part of it unless include_stop_str_in_output"""
    stop_token_ids: list[int] | None = None
    """token ids that end the output"""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """do not stop at the checkpoint's end-of-sequence tokens"""
    skip_special_tokens: bool = True
    """leave special tokens out of the text (they stay in token_ids)"""
    detokenize: bool = True
    """make text; without it only token ids come out and stop strings are not allowed"""
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
        check_int("n", self.n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, "a 32-bit integer")
        if self.output_kind not in OUTPUT_KINDS:
            raise InvalidParamsError(f"output_kind={self.output_kind!r}: must be one of {', '.join(OUTPUT_KINDS)}")
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_LEN:
            raise InvalidParamsError(f"tenant must be a string of at most {MAX_TENANT_LEN} characters")
        check_number("temperature", self.temperature, 0.0, math.inf, "0 for greedy, or a positive number")
        check_number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", lowest_excluded=True)
        check_int("top_k", self.top_k, -1, None, "-1 or 0 for all tokens, or a count")
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED, MAX_SEED, "a 64-bit integer")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None, "at least 1, or None for what the context holds")
        for token_id in self.stop_token_ids or ():
            check_int("stop_token_ids", token_id, 0, None, "token ids, 0 or larger")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidParamsError(
                f"structured_outputs must be StructuredOutputsParams, not {type(self.structured_outputs).__name__}"
            )
        self._check_stop()

    def _check_stop(self) -> None:
        strings = self.stop_strings
        if not all(isinstance(s, str) and s for s in strings):
            raise InvalidParamsError(f"stop={self.stop!r}: must be a string or a list of strings, none of them empty")
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidParamsError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if strings and not self.detokenize:
            raise InvalidParamsError("stop strings are searched in the text, and detokenize=False makes none")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
