"""What a beam search keeps, and when it ends."""

from typing import Literal

import msgspec

from quire.common.errors import InvalidParamsError
from quire.common.params.checks import check_flag, check_int, check_number
from quire.common.params.sampling import SamplingParams
from quire.common.params.structured_outputs import StructuredOutputsParams

EarlyStopping = bool | Literal["never"]
MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 10.0


class BeamSearchParams(msgspec.Struct, frozen=True):
    """How wide and how far to search for the likeliest outputs; names and defaults as in vLLM and transformers.

    Checked when made: a value out of range raises InvalidParamsError, which names the field, the value and the range.
    """

    beam_width: int
    """sequences that are followed at once"""
    max_tokens: int
    """tokens to generate at most"""
    ignore_eos: bool = False
    """do not stop at the checkpoint's end-of-sequence tokens"""
    temperature: float = 0.0
    """logits are divided by it; 0 and 1 leave them as they are. Nothing is drawn at random"""
    length_penalty: float = 1.0
    """outputs are ranked by the sum of their log-probabilities over length ** length_penalty: more than 0 favours long
    ones, less than 0 short ones"""
    include_stop_str_in_output: bool = False
    """leave the token that ended an output at its end"""
    early_stopping: EarlyStopping = False
    """True: end with `beam_width` finished outputs. False: end when the best beam, were it to finish now, would not
    come among them. "never": when it cannot even with the length that favours it most"""
    n: int | None = None
    """outputs returned, the best first; None: beam_width of them"""
    stop_token_ids: list[int] | None = None
    """token ids that end an output, besides the end-of-sequence tokens"""
    structured_outputs: StructuredOutputsParams | None = None
    """every output is a sentence of a grammar; log-probabilities are those among the tokens that it allows"""
    skip_special_tokens: bool = True
    """leave special tokens out of the text"""
    detokenize: bool = True
    """make text"""
    priority: int = 0
    """smaller runs first, with the scheduling policy `priority`"""
    tenant: str = ""
    """whose request it is, for the scheduling policy `fair`"""

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAMS, f"1 to {MAX_BEAMS}")
        check_int("max_tokens", self.max_tokens, 1, None, "at least 1")
        low, high = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        check_number("length_penalty", self.length_penalty, low, high, f"a number from {low:g} to {high:g}")
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidParamsError(f"early_stopping={self.early_stopping!r}: must be True, False or 'never'")
        if self.n is not None:
            check_int("n", self.n, 1, self.beam_width, f"1 to beam_width={self.beam_width}, or None for all of them")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidParamsError(
                "ignore_eos=True: with structured_outputs, an end-of-sequence token ends an output"
            )
        self.sampling_params()  # checks what it takes over

    def sampling_params(self) -> SamplingParams:
        """The request as the rooms of the engine see it that know nothing of beams: `beam_width` samples."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            structured_outputs=self.structured_outputs,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
            output_kind="final_only",
            priority=self.priority,
            tenant=self.tenant,
        )
