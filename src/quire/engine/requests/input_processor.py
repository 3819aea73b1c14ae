"""Checks what callers pass: makes token ids of prompts, and draws of parameters."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from quire.common.batch import Draw
from quire.common.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError, RequestError
from quire.common.lora import KnownAdapter
from quire.common.params import BeamSearchParams, PoolerInfo, PoolingParams, SamplingParams
from quire.common.params.checks import check_text, plain
from quire.common.params.sampling import ALL_LOGPROBS, MAX_SALT_LEN
from quire.config.args import EngineConfig
from quire.engine.requests.beam_search import BeamSearch
from quire.engine.requests.logprobs import LogprobRows, PromptScores
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.pooling import CANNOT_GENERATE, CheckedPrompt, PoolingInputs, as_sampling_params
from quire.engine.requests.prediction import with_tokenized_prediction
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from quire.runner.sampling.random import random_key, uniform_bits
from quire.text.tokenizer.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = str | SequenceOf[int] | Mapping[str, object] | CheckedPrompt
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a dict may also contain `cache_salt`. Or for a
pooling request what was made of these."""
_USUAL_CHARS = 8
"""Characters of a token, as a rule. A text with more for each token of the context is first encoded in pieces."""
_PIECE_CHARS = 64 * 1024
_BORDER_TOKENS = 16
"""Number of tokens that a piece may have more by itself than within the text."""
_SCORING = SamplingParams(detokenize=False, output_kind="final_only")


class CheckedRequest(msgspec.Struct, frozen=True):
    """A request that can run, before anything has been computed."""

    outputs: OutputBuilder
    sample: SampleOutput
    """Its first sample; the others are forks of it."""
    content_key: ContentKey
    search: BeamSearch | None = None
    adapter: KnownAdapter | None = None


class InputProcessor:
    """Makes requests of prompts and parameters, for one model and its tokenizer, or raises a RequestError."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, pooler: PoolerInfo | None = None) -> None:
        """`pooler` says what a pooling model can make; None for a model that generates."""
        self.config, self.model = config, config.model
        self.tokenizer = tokenizer
        self.pooling = PoolingInputs(self, pooler)
        self._advice = "raise max_model_len" if pooler is None else "cut it with truncate_prompt_tokens=-1"
        self._num_requests = 0

    # Requests

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        arrival_time: float,
        adapter: KnownAdapter | None = None,
    ) -> CheckedRequest:
        """A request that can run. Raises RequestError."""
        if isinstance(params, PoolingParams):
            return self._pooling_request(request_id, prompt, params, arrival_time, adapter)
        self.check_generates()
        search = None
        params = copy(params)  # the caller may change its own
        if isinstance(params, BeamSearchParams):
            search = BeamSearch(params, self.model, self.config.scheduler.max_num_seqs)
            params = params.sampling_params()
        text, token_ids, key = self.prompt(prompt, params, adapter)
        self.check_params(params)
        params = with_tokenized_prediction(self, params)
        decode = self.tokenizer.decode_token if params.detokenize else None
        logprobs = scores = None
        if params.logprobs is not None or params.ranks_samples:
            logprobs = LogprobRows(decode, keeps=params.logprobs is not None)
        if params.prompt_logprobs is not None:
            scores = PromptScores(1, token_ids[1:], self._num_logprobs(params.prompt_logprobs), decode)
        sample = SampleOutput(params, self.model.eos_token_ids, self._detokenizer(token_ids, params), logprobs)
        outputs = OutputBuilder(request_id, token_ids, params, arrival_time, text, scores, adapter=adapter)
        return CheckedRequest(outputs, sample, key, search, adapter)

    def _pooling_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        arrival_time: float,
        adapter: KnownAdapter | None,
    ) -> CheckedRequest:
        checked = self.pooling.checked(prompt, params)
        text, token_ids, salt = checked.text, list(checked.token_ids), checked.cache_salt or params.cache_salt
        pooling = self.pooling.wanted(checked.spec, len(token_ids), checked.token_type_ids)
        known = as_sampling_params(params.priority, params.tenant)
        outputs = OutputBuilder(request_id, token_ids, known, arrival_time, text, pooling=pooling, adapter=adapter)
        return CheckedRequest(outputs, SampleOutput(known), _content_key(salt, adapter), adapter=adapter)

    def check_generates(self) -> None:
        """Raise RequestError if the model pools, and cannot generate."""
        if self.model.runner == "pooling":
            raise RequestError(CANNOT_GENERATE)

    def scoring_request(
        self,
        request_id: str,
        context: Prompt,
        continuation: Prompt | None,
        arrival_time: float,
        adapter: KnownAdapter | None = None,
    ) -> CheckedRequest:
        """A request to score the continuation's tokens, or without one the context's own. Raises RequestError."""
        self.check_generates()
        token_ids, first, key = self.continuation(context, continuation, adapter)
        scores = PromptScores(first, token_ids[first:], 0, None)
        outputs = OutputBuilder(request_id, token_ids, _SCORING, arrival_time, scores=scores, adapter=adapter)
        return CheckedRequest(outputs, SampleOutput(_SCORING), key, adapter=adapter)

    # Prompts

    def prompt(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: KnownAdapter | None = None
    ) -> tuple[str | None, list[int], ContentKey]:
        """Return the text if it was given, the token ids, and what else the cached content depends on."""
        text, token_ids, cache_salt = self.parse_prompt(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self.encode(text, cuts=params is not None and params.truncate_prompt_tokens is not None)
        if params is not None:
            token_ids = self._truncate(token_ids, params)
            if cache_salt and params.cache_salt and cache_salt != params.cache_salt:
                raise InvalidParamsError("cache_salt is given with the prompt and in the params, and they differ")
            cache_salt = cache_salt or params.cache_salt
        limit = self.model.max_model_len
        if len(token_ids) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, and this model's maximum context length is {limit} tokens, "
                "one of them for the output: shorten the prompt or raise max_model_len"
            )
        self.check_token_ids(token_ids)
        return text, token_ids, _content_key(cache_salt, adapter)

    def encode(self, text: str, add_special_tokens: bool = True, *, cuts: bool = False) -> list[int]:
        """Return the token ids of a text, or of its end alone if the request `cuts` it. Raises PromptTooLongError."""
        return self.tokenizer.encode(self.readable(text, cuts), add_special_tokens)

    def readable(self, text: str, cuts: bool, *, keeps_start: bool = False) -> str:
        """Return the text, or the part that is used if it is cut: its end, or its start. Encoding takes a hundred bytes
        of memory for each character, so a long text is encoded piece by piece, until there are too many tokens."""
        limit, num_tokens = self.model.max_model_len, 0
        most = limit * self.tokenizer.max_token_len
        if len(text) > most and not cuts:
            raise PromptTooLongError(
                f"the text has {len(text):,} characters, and this model's maximum context length is {limit} tokens, "
                f"which have at most {most:,}: shorten it or {self._advice}"
            )
        if keeps_start and cuts:
            return text[: max(_PIECE_CHARS, most)]
        text = text[-most:]
        is_usual = len(text) <= _PIECE_CHARS or len(text) <= _USUAL_CHARS * limit
        for end in range(0 if is_usual else len(text), 0, -_PIECE_CHARS):
            start = max(0, end - _PIECE_CHARS)
            num_tokens += len(self.tokenizer.encode(text[start:end], add_special_tokens=False)) - _BORDER_TOKENS
            if num_tokens > limit and cuts:
                return text[start:]
            if num_tokens > limit:
                raise PromptTooLongError(
                    f"the text has {len(text):,} characters and more than {num_tokens:,} tokens, and this model's "
                    f"maximum context length is {limit} tokens: shorten it or {self._advice}"
                )
        return text

    def continuation(
        self, context: Prompt, continuation: Prompt | None, adapter: KnownAdapter | None = None
    ) -> tuple[list[int], int, ContentKey]:
        """Return the token ids of both, the index of the first that is scored, and what else the cached content depends
        on.

        Two texts are encoded as one, and scored from the first token that differs from those of the context alone, so
        also where a token lies across the border. Without a continuation all tokens except the first are scored.
        """
        text, token_ids, cache_salt = self.parse_prompt(context)
        more_text, more_token_ids = (None, None) if continuation is None else self.parse_prompt(continuation)[:2]
        if continuation is None:
            first, token_ids = 1, self.encode(text or "") if token_ids is None else token_ids
        elif token_ids is not None and more_token_ids is not None:
            first, token_ids = len(token_ids), token_ids + more_token_ids
        elif text is not None and more_text is not None and token_ids is None and more_token_ids is None:
            alone, token_ids = self.encode(text), self.encode(text + more_text)
            pairs = zip(alone, token_ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(token_ids)))
        else:
            raise InvalidPromptError("a context and its continuation must both be text, or both token ids")
        self.check_token_ids(token_ids)
        if not 0 < first < len(token_ids):
            raise InvalidPromptError(
                f"the context has {first} tokens and the continuation {len(token_ids) - first} (one across their "
                "border is the continuation's): each needs one at least"
            )
        if len(token_ids) > self.model.max_model_len:
            raise PromptTooLongError(
                f"context and continuation have {len(token_ids)} tokens, and this model's maximum context length is "
                f"{self.model.max_model_len} tokens: shorten the context or raise max_model_len"
            )
        return token_ids, first, _content_key(cache_salt, adapter)

    def parse_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
        """Return (text, token ids, salt). The caller passed one of the first two, or both; the other is None."""
        if isinstance(prompt, str):
            return prompt, None, ""
        given: Any = None, prompt, ""
        if isinstance(prompt, dict | Mapping):  # the class alone first: it takes no call of Python
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not prompt:
                raise InvalidPromptError(
                    "a prompt given as a dict has 'prompt' or 'prompt_token_ids', and 'cache_salt' if you like, "
                    f"not {sorted(map(str, prompt))}"
                )
            given = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
        text, token_ids, cache_salt = given
        if hasattr(token_ids, "tolist"):  # an array or a tensor
            token_ids = token_ids.tolist()
        try:
            check_text("cache_salt", cache_salt, MAX_SALT_LEN)
        except InvalidParamsError as error:
            raise InvalidPromptError(str(error)) from error
        if text is not None and not isinstance(text, str):
            raise InvalidPromptError(f"the prompt's text must be a string, not {type(text).__name__}")
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, list | None | SequenceOf):
            raise InvalidPromptError(
                f"the prompt's token ids must be a list of integers, not {type(token_ids).__name__}"
            )
        if text is None and token_ids is None:
            raise InvalidPromptError("the prompt has neither text nor token ids")
        return text, None if token_ids is None else list(token_ids), cache_salt

    def check_token_ids(self, token_ids: list[int]) -> None:
        """Raise InvalidPromptError unless these are ids of the model. Integers of NumPy or torch become Python's."""
        if not token_ids:
            raise InvalidPromptError("the prompt is empty: give at least one token")
        vocab_size = self.model.vocab_size
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return  # many times faster than one by one
        token_ids[:] = map(plain, token_ids)
        for each in token_ids:
            if type(each) is not int or not 0 <= each < vocab_size:
                raise InvalidPromptError(f"token id {each!r} is not one of this model's, 0 to {vocab_size - 1}")

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep, limit = params.truncate_prompt_tokens, self.model.max_model_len
        if keep is None:
            return token_ids
        if keep >= limit:
            raise InvalidParamsError(
                f"truncate_prompt_tokens={keep}: the context holds {limit} tokens, one of them for the output"
            )
        return token_ids[-(max(1, limit - (params.max_tokens or 1)) if keep == -1 else keep) :]

    # Params

    def check_params(self, params: SamplingParams) -> None:
        """Check what depends on this model and this engine. Raises InvalidParamsError."""
        max_num_seqs = self.config.scheduler.max_num_seqs
        if params.num_samples > max_num_seqs:
            name = "best_of" if params.ranks_samples else "n"
            raise InvalidParamsError(
                f"{name}={params.num_samples}: this engine runs at most max_num_seqs={max_num_seqs} at once"
            )
        for name in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(name, getattr(params, name) or 0)
        if params.ranks_samples and self.config.logprobs_mode.endswith("logits"):
            raise InvalidParamsError(
                f"best_of={params.best_of} ranks samples by their log-probabilities, and this engine returns logits "
                f"(logprobs_mode={self.config.logprobs_mode})"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(name, getattr(params, name) or ())
        if params.allowed_token_ids is not None:
            self._check_something_is_left(set(params.allowed_token_ids), self._draw(params))

    def _check_num_logprobs(self, name: str, wanted: int) -> None:
        limit = self.config.max_logprobs
        if limit != ALL_LOGPROBS and max(wanted, self._num_logprobs(wanted)) > limit:
            raise InvalidParamsError(
                f"{name}={wanted}: this engine gives at most max_logprobs={limit}; "
                "raise it (-1: no limit) or ask for fewer"
            )

    def _num_logprobs(self, wanted: int) -> int:
        """Return how many of the likeliest tokens are returned."""
        return self.model.vocab_size if wanted == ALL_LOGPROBS else min(wanted, self.model.vocab_size)

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        if (largest := max(token_ids, default=0)) >= self.model.vocab_size:
            raise InvalidParamsError(f"{name} has {largest}: this model's token ids end at {self.model.vocab_size - 1}")

    def _check_something_is_left(self, allowed: set[int], draw: Draw) -> None:
        """Check that some token can be drawn after any history."""
        if not allowed - {word[-1] for word in draw.bad_words}:
            raise InvalidParamsError("bad_words may leave none of allowed_token_ids: allow more, or ban fewer")
        if not allowed - {word[-1] for word in draw.bad_words} - set(draw.stop_token_ids):
            raise InvalidParamsError(
                f"min_tokens={draw.min_tokens} may leave none of allowed_token_ids: allow a token that does not stop"
            )

    def draws(self, params: SamplingParams, processors: tuple[str, ...] = ()) -> tuple[Draw, ...]:
        """Return one draw for each sample, with the request's seed or one that depends on its place by arrival.
        `processors` are the names of its logits processors."""
        seed = self.seed(self._num_requests) if params.seed is None else params.seed
        self._num_requests += 1
        draw = replace(self._draw(params), processors=processors)
        return tuple(replace(draw, random_key=random_key(seed, i), index=i) for i in range(params.num_samples))

    def seed(self, place: int) -> int:
        """Return the seed of the request at this place by arrival. Scoring requests are not counted."""
        return uniform_bits(random_key(self.config.seed, 0), place)

    def _draw(self, params: SamplingParams) -> Draw:
        """Return the part of the draws that all samples have in common."""
        logprobs = None if params.logprobs is None else self._num_logprobs(params.logprobs)
        return Draw(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=max(0, params.top_k) if params.top_k < self.model.vocab_size else 0,
            top_p=params.top_p,
            random_key=b"",
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=tuple(sorted(set(params.allowed_token_ids))) if params.allowed_token_ids else None,
            bad_words=self._bad_words(params),
            min_tokens=params.min_tokens,
            stop_token_ids=self._stop_token_ids(params) if params.min_tokens else (),
            logprobs=0 if logprobs is None and params.ranks_samples else logprobs,
        )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that min_tokens delays: as in vLLM, end-of-sequence tokens too with ignore_eos."""
        return tuple(sorted(self.model.eos_token_ids | set(params.stop_token_ids or ())))

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """As in vLLM: the tokens of each word at the beginning of a text and, if they differ, after a space."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            plain, spaced = (
                tuple(self.tokenizer.encode(space + (word.lstrip() or word), add_special_tokens=False))
                for space in ("", " ")
            )
            if not plain:
                raise InvalidParamsError(f"bad_words has {word!r}, of which this model's tokenizer makes no token")
            self.check_ids("bad_words", plain)
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def _content_key(cache_salt: str, adapter: KnownAdapter | None) -> ContentKey:
    return ContentKey(adapter.digest if adapter is not None else "", cache_salt) if cache_salt or adapter else NO_KEY
