"""LLM: the interface for offline use. It takes prompts and returns their finished outputs in the same order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from quire.common.errors import InvalidParamsError, InvalidPromptError, RequestError, RequestFailedError
from quire.common.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    TokenScores,
)
from quire.common.params import BeamSearchParams, PoolerInfo, PoolingParams, PoolingTask, SamplingParams
from quire.common.progress import BarChoice
from quire.engine.adapters import AnyAdapter
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.pooling import CANNOT_POOL
from quire.interfaces.engine_owner import EngineOwner
from quire.interfaces.pooling import (
    CLASSES,
    EMBEDDINGS,
    SCORES,
    VECTORS,
    ScoredPairs,
    pooling_output,
    pooling_params,
    tokenization,
)
from quire.interfaces.prompts import (
    adapters_of,
    beam_search_output,
    is_conversation,
    listed_prompts,
    made_prompts,
    params_per_prompt,
    prioritized,
    token_scores,
)
from quire.interfaces.running import Run, run_pooling
from quire.kv.prefix_cache.pins import PinnedPrefix

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a `role` and a `content`."""
_Pooled = TypeVar("_Pooled", bound=PoolingRequestOutput[Any])


class LLM(EngineOwner):
    """Generates outputs for many prompts at once. It is a thin adapter over one engine, its attribute `engine`, or over
    several in processes of their own, with `data_parallel_size`.

    The arguments are those of EngineArgs; the default model is the embedded checkpoint. `logits_processors` are classes
    that may change the logits of every request (quire.v1.sample.logits_processor). Raises ConfigError, CheckpointError
    for a missing or damaged checkpoint, and OutOfMemoryError. An LLM must be used by one thread only.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: BarChoice = True,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts in one batch, and return the outputs in the order of the prompts.

        A prompt is a text, a list or array of token ids, or a dict with `prompt` or `prompt_token_ids`.
        `sampling_params` is one value for all prompts, one for each prompt, or None for the checkpoint's
        recommendation. `priority`, one for all or one for each, replaces theirs. `lora_request` is the LoRA adapter,
        one for all or one or None for each. A progress bar appears in a notebook, or on standard error if that is a
        terminal; with `use_tqdm=False` never, and if `use_tqdm` is a function or class, that makes the bar.

        An invalid prompt given alone raises a RequestError. In a list, its output has `error` set and the finish reason
        `ignored`, and the other prompts run. If an internal error occurs in the work for one prompt, its output has
        `error` set and the tokens so far. If this method raises, all requests of the call are aborted.
        """
        listed, alone = listed_prompts(prompts)
        params = prioritized(self._params_per_prompt(sampling_params, len(listed)), priority)
        return self._generate(listed, params, alone, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: BarChoice = False,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest outputs of each prompt by beam search; see docs/beam-search.md.

        The forms of prompts, the order of outputs and the handling of invalid prompts are the same as in `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParamsError(f"params must be BeamSearchParams, not {type(params).__name__}")
        if self._processors.are_any:
            raise InvalidParamsError("beam search runs no logits processors, and this LLM was made with some")
        listed, alone = listed_prompts(prompts)
        outputs = self._generate(listed, [params] * len(listed), alone, use_tqdm, lora_request)
        return [beam_search_output(output, params, self._engine.tokenizer) for output in outputs]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: BarChoice = True,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
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
        alone = is_conversation(messages)
        conversations: list[Any] = [messages] if alone else list(messages)
        params = self._params_per_prompt(sampling_params, len(conversations))
        if not isinstance(variables := chat_template_kwargs or {}, Mapping) or not set(map(type, variables)) <= {str}:
            raise InvalidParamsError(f"chat_template_kwargs={variables!r}: must be a dict with names of variables")
        arguments: dict[str, Any] = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "content_format": chat_template_content_format,
        }
        make_prompt = partial(self.chat_prompt, **arguments | dict(variables))
        return self._generate(made_prompts(conversations, make_prompt), params, alone, use_tqdm, lora_request)

    def chat_prompt(self, messages: Conversation, **template_arguments: Any) -> dict[str, Any]:
        """Return a conversation's prompt as `generate` takes it; for arguments see Tokenizer.apply_chat_template."""
        tokenizer = self._engine.tokenizer
        text = tokenizer.apply_chat_template(messages, **template_arguments)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        use_tqdm: BarChoice = True,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
    ) -> list[TokenScores]:
        """Return the log-probabilities of each continuation's tokens after its prompt; nothing is generated.

        Give one prompt for all continuations, or one for each. They run in one batch, so that common prefixes are
        computed once. A pair of texts is tokenized as one text, and the tokens that differ from those of the prompt
        alone are scored. Log-probabilities come from the model's own logits for every logprobs_mode. Raises
        RequestError if any pair is invalid, and then runs none of them.
        """
        contexts, texts = (listed_prompts(given)[0] for given in (prompts, continuations))
        contexts = contexts * len(texts) if len(contexts) == 1 else contexts
        if len(contexts) != len(texts):
            raise InvalidPromptError(
                f"{len(contexts)} prompts for {len(texts)} continuations: give one for all, or one for each"
            )
        return self._score(contexts, texts, use_tqdm, lora_request)

    def perplexity(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: BarChoice = True,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
    ) -> list[float]:
        """Return, for each prompt, exp of the mean negative log-probability of its tokens except the first."""
        listed = listed_prompts(prompts)[0]
        scores = self._score(listed, [None] * len(listed), use_tqdm, lora_request)
        return [math.exp(-score.sum_logprob / len(score.logprobs)) for score in scores]

    def _score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Prompt | None],
        use_tqdm: BarChoice,
        lora_request: AnyAdapter | Sequence[AnyAdapter],
    ) -> list[TokenScores]:
        adapters = adapters_of(lora_request, len(contexts))

        def add(request_id: str, place: int) -> None:
            self._engine.add_scoring_request(
                request_id, contexts[place], continuations[place], lora_request=adapters[place]
            )

        run = Run(self._engine, self._request_ids, contexts, add, alone=True)
        return [token_scores(output) for output in run.outputs(use_tqdm)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: BarChoice = True,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool one text or each of a list, as `pooling_task` says, and return the outputs in the order of the texts.

        Prompts and errors are as for `generate`, but a prompt that is too long raises before any is computed.
        `pooling_task` and `truncate_prompt_tokens` replace parameters. vLLM's `tokenization_kwargs` may have
        `truncate_prompt_tokens`, `truncation_side`, `truncation` with `max_length`, and `add_special_tokens`.
        """
        cut = tokenization(tokenization_kwargs, truncate_prompt_tokens)
        return self._pool(VECTORS, prompts, pooling_params, pooling_task, cut, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: BarChoice = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each text: `encode` with the task `embed`."""
        cut = tokenization(tokenization_kwargs, truncate_prompt_tokens)
        return self._pool(EMBEDDINGS, prompts, pooling_params, "embed", cut, use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: BarChoice = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each text's classes: `encode` with the task `classify`."""
        cut = tokenization(tokenization_kwargs, None)
        return self._pool(CLASSES, prompts, pooling_params, "classify", cut, use_tqdm, lora_request)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: BarChoice = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's values: of each token if it has the task `token_classify`, otherwise of each text."""
        task: PoolingTask = "token_classify" if "token_classify" in self._pooler().tasks else "classify"
        cut = tokenization(tokenization_kwargs, truncate_prompt_tokens)
        return self._pool(VECTORS, prompts, pooling_params, task, cut, use_tqdm, lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: BarChoice = True,
        pooling_params: PoolingParams | None = None,
        lora_request: AnyAdapter | Sequence[AnyAdapter] = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit together: one text with each of `data_2`, or each with its own.

        A cross-encoder reads both texts at once, joined by the tokenizer, or by `chat_template` as messages of a
        `query` and a `document`. With an embedder the score is the cosine of their embeddings, and with a model that
        has vectors of tokens alone (ColBERT) the sum, over those of the first text, of the largest product with one of
        the second.
        """
        pairs, tasks = ScoredPairs.of(data_1, data_2), self._pooler().tasks
        cut = tokenization(tokenization_kwargs, truncate_prompt_tokens)
        if "score" in tasks:
            if chat_template is None and not cut[1]:
                raise InvalidParamsError("add_special_tokens=False: they separate the texts of a pair")
            prompts = pairs.joined(self._engine.tokenizer, chat_template)
            return self._pool(SCORES, prompts, pooling_params, "score", cut, use_tqdm, lora_request)
        if chat_template is not None:
            raise InvalidParamsError("chat_template is for models that read both texts of a pair, and this one embeds")
        task: PoolingTask = "token_embed" if "token_embed" in tasks and "embed" not in tasks else "embed"
        texts = [*pairs.firsts, *pairs.seconds]
        return pairs.by_likeness(self._pool(VECTORS, texts, pooling_params, task, cut, use_tqdm, lora_request))

    def _pooler(self) -> PoolerInfo:
        """Return what the model can pool. Raises RequestError if it generates."""
        if self._engine.pooler is None:
            raise RequestError(CANNOT_POOL)
        return self._engine.pooler

    def _pool(
        self,
        kind: tuple[type[_Pooled], type[PoolingOutput]],
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        cut: tuple[Mapping[str, Any], bool],
        use_tqdm: BarChoice,
        lora_request: AnyAdapter | Sequence[AnyAdapter],
    ) -> list[_Pooled]:
        """Run pooling requests; the task and what `tokenization` returned replace parameters if not None."""
        self._pooler()
        listed, alone = listed_prompts(prompts)
        wanted, adapters = pooling_params(params, task, cut[0], len(listed)), adapters_of(lora_request, len(listed))
        pooled = run_pooling(
            self._engine,
            self._request_ids,
            listed,
            wanted,
            adapters,
            alone=alone,
            use_tqdm=use_tqdm,
            add_special_tokens=cut[1],
        )
        return [pooling_output(output, *kind) for output in pooled]

    def pin_prefix(self, prompt: Prompt, *, lora_request: AnyAdapter = None) -> PinnedPrefix:
        """Keep the KV cache blocks of a prompt until `unpin_prefix`, computing them first if they are not cached.

        Raises RequestError if the prompt is invalid or needs more blocks than `pinned_fraction` allows.
        """
        self._engine.check_pin(prompt, lora_request)
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self.generate(prompt, params, use_tqdm=False, lora_request=lora_request)
        return self._engine.pin_prefix(prompt, lora_request)

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Allow a pinned prefix to be evicted again. Raises RequestError if it is no longer pinned."""
        self._engine.unpin_prefix(pin)

    def _params_per_prompt(self, given: Any, num_prompts: int) -> list[SamplingParams]:
        default = self.default_sampling_params() if given is None else given
        return [self._processors.added_to(params) for params in params_per_prompt(default, num_prompts)]

    def _generate(
        self,
        prompts: Sequence[Prompt | RequestError | RequestFailedError],
        params: Sequence[SamplingParams | BeamSearchParams],
        alone: bool,
        use_tqdm: BarChoice,
        lora_request: AnyAdapter | Sequence[AnyAdapter],
    ) -> list[RequestOutput]:
        """Run requests; an item of `prompts` may be the error that making the prompt raised."""
        self._engine.inputs.check_generates()
        adapters = adapters_of(lora_request, len(prompts))

        def add(request_id: str, place: int) -> None:
            prompt = prompts[place]
            if isinstance(prompt, RequestError | RequestFailedError):
                raise prompt
            self._engine.add_request(request_id, prompt, params[place], lora_request=adapters[place])

        return Run(self._engine, self._request_ids, prompts, add, alone=alone).outputs(use_tqdm)
