"""LLM: the interface for offline use. It takes prompts and returns their finished outputs in the same order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace
from tqdm import tqdm

from quire.common.errors import (
    InvalidParamsError,
    InvalidPromptError,
    QuireError,
    RequestError,
    RequestFailedError,
    failures_named,
)
from quire.common.interrupts import interrupt_deferred
from quire.common.log import logger
from quire.common.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
    TokenScores,
)
from quire.common.params import BeamSearchParams, SamplingParams
from quire.config.args import EngineArgs
from quire.engine.llm_engine import LLMEngine
from quire.engine.requests.input_processor import Prompt
from quire.kv.prefix_cache.pins import PinnedPrefix
from quire.text.tokenizer.tokenizer import Tokenizer

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a `role` and a `content`."""


class LLM:
    """Generates outputs for many prompts at once. It is a thin adapter over one engine, its attribute `engine`.

    The arguments are the fields of EngineArgs; the default model is the embedded checkpoint. Raises ConfigError for an
    argument that is unknown or out of range, CheckpointError for a checkpoint that is missing or damaged, and
    OutOfMemoryError if the memory does not suffice. An LLM must be used by one thread only.
    """

    def __init__(self, model: str | Path | None = None, **kwargs: Any) -> None:
        self.engine = LLMEngine.from_args(EngineArgs(model=model if model is None else str(model), **kwargs))
        self._request_ids = _request_ids()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """Make an LLM, and the engine that these arguments describe."""
        return cls.from_engine(LLMEngine.from_args(args))

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Make an LLM over an existing engine."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._request_ids = _request_ids()
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts in one batch, and return the outputs in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. `sampling_params` is one
        value for all prompts, one for each prompt, or None for the checkpoint's recommendation. `priority`, one for all
        or one for each, replaces theirs. `lora_request` must be None.

        An invalid prompt given alone raises a RequestError. In a list, its output has `error` set and the finish reason
        `ignored`, and the other prompts run. If an internal error occurs in the work for one prompt, its output has
        `error` set and the tokens so far. If this method raises, all requests of the call are aborted.
        """
        _refuse_adapters(lora_request)
        listed, alone = _listed(prompts)
        params = _prioritized(self._params_per_prompt(sampling_params, len(listed)), priority)
        return self._generate(listed, params, alone, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Find the likeliest outputs of each prompt by beam search; see docs/beam-search.md.

        The forms of prompts, the order of outputs and the handling of invalid prompts are the same as in `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParamsError(f"params must be BeamSearchParams, not {type(params).__name__}")
        listed, alone = _listed(prompts)
        outputs = self._generate(listed, [params] * len(listed), alone, use_tqdm)
        return [self._beam_search_output(output, params) for output in outputs]

    def _beam_search_output(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        """Return the output with the prompt at the beginning of each sequence, as in vLLM."""
        found = [beam for beam in output.outputs if beam.finish_reason != "ignored"]
        sequences = [
            BeamSearchSequence(
                output.prompt_token_ids + beam.token_ids,
                beam.cumulative_logprob or 0.0,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for beam in found
        ]
        for sequence in sequences if params.detokenize else ():
            sequence.text = self.get_tokenizer().decode(sequence.tokens, params.skip_special_tokens)
        return BeamSearchOutput(sequences, output.error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by `chat_template` or else the checkpoint's template.

        Otherwise it works like `generate`; Tokenizer.apply_chat_template explains the forms of content. Raises
        TokenizerError if the template is missing or invalid.
        """
        _refuse_adapters(lora_request)
        alone = _is_conversation(messages)
        conversations: list[Any] = [messages] if alone else list(messages)
        params = self._params_per_prompt(sampling_params, len(conversations))
        prompts: list[Prompt | RequestError | RequestFailedError] = []
        for conversation in conversations:
            try:
                with failures_named(f"number {len(prompts)}", "when its prompt was made"):
                    prompts.append(
                        self.chat_prompt(
                            conversation,
                            chat_template=chat_template,
                            add_generation_prompt=add_generation_prompt,
                            continue_final_message=continue_final_message,
                            tools=tools,
                            content_format=chat_template_content_format,
                            **(chat_template_kwargs or {}),
                        )
                    )
            except (RequestError, RequestFailedError) as error:
                prompts.append(error)
        return self._generate(prompts, params, alone, use_tqdm)

    def chat_prompt(self, messages: Conversation, **template_arguments: Any) -> dict[str, Any]:
        """Return a conversation's prompt as `generate` takes it; for arguments see Tokenizer.apply_chat_template."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **template_arguments)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def score_tokens(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[TokenScores]:
        """Return the log-probabilities of each continuation's tokens after its prompt; nothing is generated.

        Give one prompt for all continuations, or one for each. They run in one batch, so that common prefixes are
        computed once. A pair of texts is tokenized as one text, and the tokens that differ from those of the prompt
        alone are scored. Log-probabilities come from the model's own logits for every logprobs_mode. Raises
        RequestError if any pair is invalid, and then runs none of them.
        """
        contexts, texts = (_listed(given)[0] for given in (prompts, continuations))
        contexts = contexts * len(texts) if len(contexts) == 1 else contexts
        if len(contexts) != len(texts):
            raise InvalidPromptError(
                f"{len(contexts)} prompts for {len(texts)} continuations: give one for all, or one for each"
            )
        add = self.engine.add_scoring_request
        outputs = self._run(contexts, lambda request_id, i: add(request_id, contexts[i], texts[i]), True, use_tqdm)
        return [_token_scores(output) for output in outputs]

    def perplexity(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[float]:
        """Return, for each prompt, exp of the mean negative log-probability of its tokens except the first."""
        listed, add = _listed(prompts)[0], self.engine.add_scoring_request
        outputs = self._run(listed, lambda request_id, i: add(request_id, listed[i], None), True, use_tqdm)
        scores = [_token_scores(output) for output in outputs]
        return [math.exp(-score.sum_logprob / len(score.logprobs)) for score in scores]

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Keep the KV cache blocks of a prompt until `unpin_prefix`, computing them first if they are not cached.

        Raises RequestError if the prompt is invalid or needs more blocks than `pinned_fraction` allows.
        """
        self.engine.check_pin(prompt)
        self.generate(prompt, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
        return self.engine.pin_prefix(prompt)

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Allow a pinned prefix to be evicted again. Raises RequestError if it is no longer pinned."""
        self.engine.unpin_prefix(pin)

    def get_tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer."""
        return self.engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's recommended parameters, with SamplingParams' defaults for the rest."""
        return self.engine.default_sampling_params()

    def get_default_sampling_params(self) -> SamplingParams:
        """The same as `default_sampling_params`, under vLLM's name."""
        return self.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, except pinned ones. Returns False, and does nothing, while requests run."""
        return self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and KV cache until `wake_up`. All `level`s are the same: the weights are in
        their files. Raises RequestError while requests run."""
        self.engine.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again. It is ready for `generate`, whatever `tags` are given."""
        self.engine.wake_up()

    def _params_per_prompt(self, given: Any, num_prompts: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [replace(given or self.default_sampling_params(), output_kind="final_only")] * num_prompts
        listed = list(given) if isinstance(given, Sequence) else [given]
        for params in listed:
            if not isinstance(params, SamplingParams):
                raise InvalidParamsError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        if len(listed) != num_prompts:
            raise InvalidParamsError(
                f"{len(listed)} sampling_params for {num_prompts} prompts: give one for all, or one for each"
            )
        return [replace(params, output_kind="final_only") for params in listed]

    def _generate(
        self,
        prompts: Sequence[Prompt | RequestError | RequestFailedError],
        params: Sequence[SamplingParams | BeamSearchParams],
        alone: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run requests; an item of `prompts` may be the error that making the prompt raised."""

        def add(request_id: str, place: int) -> None:
            prompt = prompts[place]
            if isinstance(prompt, RequestError | RequestFailedError):
                raise prompt
            self.engine.add_request(request_id, prompt, params[place])

        return self._run(prompts, add, alone, use_tqdm)

    def _run(
        self, prompts: Sequence[Any], add: Callable[[str, int], None], alone: bool, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run all requests to their end. `add(request_id, i)` queues the request for prompt i.

        With `alone`, an invalid request raises; otherwise its error is in its output.
        """
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        places: dict[str, int] = {}
        with _progress(self.engine, len(prompts), use_tqdm) as show_progress:
            try:
                for i, prompt in enumerate(prompts):
                    request_id = next(self._request_ids)
                    try:
                        add(request_id, i)
                        places[request_id] = i
                    except (RequestError, RequestFailedError) as error:
                        if alone:
                            raise
                        outputs[i] = _rejected(request_id, prompt, error)
                        show_progress(1)
                while places:
                    with interrupt_deferred():
                        changed = self.engine.step()
                    finished = [output for output in changed if output.request_id in places]
                    for output in finished:
                        outputs[places.pop(output.request_id)] = output
                    show_progress(len(finished))
            except BaseException:
                for request_id in places:
                    self.engine.abort_request(request_id)
                raise
        done = [output for output in outputs if output is not None]
        for i, output in enumerate(done):
            if output.error is not None:
                ignored = output.outputs[0].finish_reason == "ignored"
                if alone and ignored:
                    raise RequestError(output.error)
                logger.warning("prompt %d %s: %s", i, "was not run" if ignored else "was cut short", output.error)
        return done


def _refuse_adapters(lora_request: object) -> None:
    if lora_request is not None:
        raise InvalidParamsError("lora_request must be None: there are no LoRA adapters so far")


def _prioritized(params: list[SamplingParams], priority: int | Sequence[int] | None) -> list[SamplingParams]:
    if priority is None:
        return params
    listed = [priority] * len(params) if isinstance(priority, int) else list(priority)
    if len(listed) != len(params):
        raise InvalidParamsError(
            f"{len(listed)} priorities for {len(params)} prompts: give one for all, or one for each"
        )
    return [replace(each, priority=number) for each, number in zip(params, listed, strict=True)]


@contextmanager
def _progress(engine: LLMEngine, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of finished requests, with tokens per second. Call the function with the number of requests
    that have finished since the last call."""
    start = engine.stats()
    with tqdm(total=total, desc="Generating", unit="prompt", dynamic_ncols=True, disable=not shown) as bar:

        def update(num_finished: int) -> None:
            if not bar.disable:
                elapsed, now = max(bar.format_dict["elapsed"], 1e-9), engine.stats()
                input_rate = (now.num_prompt_tokens - start.num_prompt_tokens) / elapsed
                output_rate = (now.num_generated_tokens - start.num_generated_tokens) / elapsed
                rates = f"input {input_rate:.0f} tokens/s, output {output_rate:.0f} tokens/s"
                bar.set_postfix_str(rates, refresh=False)
                bar.update(num_finished)

        yield update


def _request_ids() -> Iterator[str]:
    return (f"llm-{i}" for i in itertools.count())


def _listed(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether a single prompt was given."""
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidPromptError(
            f"prompts must be a prompt (text, token ids or a dict) or a list of prompts, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(item, int) for item in prompts):  # the token ids of one prompt
        return [prompts], True
    return list(prompts), False


def _token_scores(output: RequestOutput) -> TokenScores:
    if output.error is not None:
        raise RequestError(output.error)
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    scored = [(token_id, known) for token_id, known in pairs if known is not None]
    entries = [known[token_id] for token_id, known in scored]
    return TokenScores(
        token_ids=[token_id for token_id, _ in scored],
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank or 0 for entry in entries],
        num_cached_tokens=output.num_cached_tokens,
    )


def _is_conversation(messages: Any) -> bool:
    """Return whether these are the messages of one conversation, valid or not, rather than a list of conversations."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return True
    return not messages or isinstance(messages[0], Mapping)


def _rejected(request_id: str, prompt: Any, error: QuireError) -> RequestOutput:
    """Return the output of a request that was rejected."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="ignored")],
        finished=True,
        error=str(error),
    )
