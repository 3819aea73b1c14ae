"""Parameters of a beam search."""

from typing import Literal

from quire.common.errors import InvalidParamsError
from quire.common.params.base import Params
from quire.common.params.checks import check_flag, check_int, check_number
from quire.common.params.sampling import SamplingParams
from quire.common.params.structured_outputs import StructuredOutputsParams

EarlyStopping = bool | Literal["never"]
MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 10.0
_SAME = (
    "temperature", "max_tokens", "stop_token_ids", "ignore_eos", "structured_outputs", "skip_special_tokens",
    "detokenize", "priority", "tenant",
)  # fmt: skip
"""Fields with the same name and meaning in SamplingParams."""


class BeamSearchParams(Params):
    """How wide and how far to search for the likeliest outputs; names and defaults as in vLLM and transformers.

    The constructor raises InvalidParamsError for a value out of range; the error names the field, value and range.
    """

    kind = "beam"

    beam_width: int
    """Number of beams that are kept at each step."""
    max_tokens: int
    """Largest number of tokens to generate."""
    ignore_eos: bool = False
    """If True, the checkpoint's end-of-sequence tokens do not end an output."""
    temperature: float = 0.0
    """Logits are divided by this number; 0 and 1 leave them unchanged. Beam search never samples at random."""
    length_penalty: float = 1.0
    """Outputs are ranked by the sum of their log-probabilities / length ** length_penalty: a penalty above 0 favours
    long outputs, one below 0 short outputs."""
    include_stop_str_in_output: bool = False
    """If True, the token that ended an output stays at its end."""
    early_stopping: EarlyStopping = False
    """True: stop as soon as `beam_width` outputs are finished. False: stop when the best running beam, if it finished
    now, would not be among the best. "never": stop when it could not be, even at its most favourable length."""
    n: int | None = None
    """Number of outputs to return, best first; None for beam_width."""
    stop_token_ids: list[int] | None = None
    """Token ids that end an output, in addition to the end-of-sequence tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """Structure of every output; log-probabilities are normalized over the tokens that it allows."""
    skip_special_tokens: bool = True
    """If True, the text leaves out special tokens."""
    detokenize: bool = True
    """If False, no text is produced."""
    priority: int = 0
    """Priority for the scheduling policy `priority`; smaller numbers run first."""
    tenant: str = ""
    """The tenant that the request belongs to, for the scheduling policy `fair`."""

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
        self.sampling_params()  # checks the fields that it copies

    def sampling_params(self) -> SamplingParams:
        """Return the request as the parts of the engine that know no beams see it: `beam_width` samples."""
        same = {name: getattr(self, name) for name in _SAME}
        return SamplingParams(n=self.beam_width, output_kind="final_only", **same)
