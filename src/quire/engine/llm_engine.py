"""The engine: requests in, steps, outputs out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from quire.batch import Draw
from quire.config.args import EngineArgs
from quire.config.model import ModelConfig
from quire.engine.commit import Committer
from quire.engine.executor import Executor
from quire.engine.grammar_queue import GrammarQueue
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError, RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.content_hash import ContentKey
from quire.kv.pins import PinnedPrefix
from quire.log import logger, show_messages
from quire.outputs import EngineStats, RequestOutput
from quire.params import SamplingParams
from quire.runner.memory_plan import MemoryPlan, plan_memory
from quire.runner.worker import Worker
from quire.sampling.random import random_key, uniform_bits
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = str | SequenceOf[int] | Mapping[str, object]
"""text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; in a dict also `cache_salt`"""

_MAX_SALT_LEN = 1024
_GRAMMAR_WAIT_S = 0.05
_COPY_BYTES_PER_S = 5e9
"""a cautious guess at how fast blocks are copied between the tiers, all threads together"""


class LLMEngine:
    """Runs many requests at once, step by step. Not thread-safe: one thread calls it.

    A wrong request is refused by `add_request` and touches nothing else. If `step` raises, no request has advanced: the
    step can be tried again, or requests aborted.
    """

    def __init__(self, plan: MemoryPlan, executor: Executor, tokenizer: Tokenizer) -> None:
        config = plan.config
        self.plan = plan
        self.model_config: ModelConfig = config.model
        self.tokenizer = tokenizer
        self.executor = executor
        self.blocks = BlockSpaceManager(
            plan.kv_cache,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            watermark=config.cache.watermark,
            pinned_fraction=config.cache.pinned_fraction,
        )
        block_copy_s = plan.kv_cache.block_bytes * plan.kv_cache.num_tensors / _COPY_BYTES_PER_S
        self.scheduler = Scheduler(config.scheduler, self.blocks, block_copy_s=block_copy_s)
        self.committer = Committer(
            self.scheduler, max_model_len=config.model.max_model_len, eos_token_ids=config.model.eos_token_ids
        )
        self.grammars = GrammarQueue(GrammarCompiler(tokenizer, config.model.vocab_size, config.model.eos_token_ids))
        self._groups: dict[str, SequenceGroup] = {}
        self._num_requests = 0

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Plan the memory, say so, load the checkpoint. Raises ConfigError, CheckpointError or OutOfMemoryError."""
        show_messages()
        plan = plan_memory(args)
        logger.info("%s", plan)
        tokenizer = Tokenizer.from_path(plan.config.model.tokenizer_path)
        return cls(plan, Worker(plan.config.model, plan.kv_cache, plan.config.parallel), tokenizer)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, arrival_time: float | None = None
    ) -> None:
        """Queue a request. Raises a RequestError, and queues nothing, if it can never run."""
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")
        text, token_ids, key = self._prompt_tokens(prompt)
        self._check_params(params)
        seq = Sequence(
            self.scheduler.new_seq_id(), token_ids, self._draws(params), self._detokenizer(token_ids, params)
        )
        self._num_requests += 1
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        group = SequenceGroup(request_id, text, seq, params, arrival_time, key)
        self._groups[request_id] = group
        (self.scheduler if params.structured_outputs is None else self.grammars).add(group)

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit. Returns the requests that got a token or finished, as their output_kind says."""
        if self.grammars:
            self._admit_compiled()
        batch = self.scheduler.schedule()
        start_s = time.monotonic()
        try:
            result = self.executor.execute(batch)
        except BaseException:
            self.scheduler.revert()
            raise
        self.scheduler.step_time.observe(batch.num_tokens, time.monotonic() - start_s)
        changed = self.committer.commit(batch, result)
        changed += [self._groups[request_id] for request_id in batch.ignored if request_id in self._groups]
        changed += self.grammars.take_failed()
        return [output for group in changed if (output := self._output(group)) is not None]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and take its blocks back; None if it is unknown or finished already."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        if not self.grammars.remove(group) and not group.is_finished:  # else in a failed step, and nobody has been told
            self.scheduler.remove(group)
        for seq in group.unfinished_seqs:
            seq.status = SequenceStatus.FINISHED_ABORTED
        return self._output(group)

    def check_pin(self, prompt: Prompt) -> None:
        """Raise a RequestError if the prompt is wrong, or larger than what may still be pinned."""
        _, token_ids, key = self._prompt_tokens(prompt)
        self.blocks.check_pin(token_ids, key)

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Keep what the cache holds of a prompt until `unpin_prefix`; computes nothing. Raises RequestError."""
        _, token_ids, key = self._prompt_tokens(prompt)
        return self.blocks.pin(token_ids, key)

    def unpin_prefix(self, pin: PinnedPrefix) -> None:
        """Let a pinned prefix be evicted like any other. Raises RequestError if it is not pinned."""
        self.blocks.unpin(pin.pin_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished or len(self.grammars) > 0

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, over SamplingParams' own defaults."""
        names = ("temperature", "top_p", "top_k")
        given = {n: v for n in names if (v := self.model_config.generation_config.get(n)) is not None}
        if self.model_config.generation_config.get("do_sample") is False:
            given = {"temperature": 0.0}
        return SamplingParams(**given)

    def stats(self) -> EngineStats:
        """The engine now."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting + len(self.grammars),
            num_swapped=len(self.scheduler.swapped),
            num_blocks=self.blocks.pool.num_blocks,
            num_used_blocks=self.blocks.num_used_blocks,
            num_steps=self.scheduler.num_steps,
            num_prompt_tokens=self.committer.num_prompt_tokens,
            num_generated_tokens=self.committer.num_generated_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped_blocks=self.scheduler.num_swapped_blocks,
            num_prefix_queried_tokens=self.blocks.stats.num_queried_tokens,
            num_prefix_hit_tokens=self.blocks.stats.num_hit_tokens,
            num_pinned_blocks=self.blocks.pins.num_blocks,
            prefix_cache=self.blocks.stats.to_dict(),
        )

    def _admit_compiled(self) -> None:
        """Let requests start whose grammars are ready; where there is nothing else to do, wait for one a little."""
        if not self.scheduler.has_unfinished:
            self.grammars.wait(_GRAMMAR_WAIT_S)
        self.grammars.admit(self.scheduler)

    def _output(self, group: SequenceGroup) -> RequestOutput | None:
        """What a request's caller is told now; a finished request is forgotten."""
        if group.is_finished:
            del self._groups[group.request_id]
        return group.to_output()

    def _prompt_tokens(self, prompt: Prompt) -> tuple[str | None, list[int], ContentKey]:
        text, token_ids, cache_salt = self._parse_prompt(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self.tokenizer.encode(text)
        vocab_size, limit = self.model_config.vocab_size, self.model_config.max_model_len
        if not token_ids:
            raise InvalidPromptError("the prompt is empty: give at least one token")
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidPromptError(f"token id {token_id!r} is not one of this model's, 0 to {vocab_size - 1}")
        if len(token_ids) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, and the context holds {limit}, one of them for the output: "
                "shorten the prompt or raise max_model_len"
            )
        return text, token_ids, ContentKey(cache_salt=cache_salt)

    def _parse_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
        """(text, token ids, salt): one of the first two given by the caller, or both."""
        cache_salt: object = ""
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not prompt:
                raise InvalidPromptError(
                    "a prompt given as a dict has 'prompt' or 'prompt_token_ids', and 'cache_salt' if you like, "
                    f"not {sorted(map(str, prompt))}"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt", "")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if not isinstance(cache_salt, str) or len(cache_salt) > _MAX_SALT_LEN:
            raise InvalidPromptError(f"cache_salt must be a string of at most {_MAX_SALT_LEN} characters")
        if text is not None and not isinstance(text, str):
            raise InvalidPromptError(f"the prompt's text must be a string, not {type(text).__name__}")
        if token_ids is not None and (isinstance(token_ids, str | bytes) or not isinstance(token_ids, SequenceOf)):
            raise InvalidPromptError(
                f"the prompt's token ids must be a list of integers, not {type(token_ids).__name__}"
            )
        if text is None and token_ids is None:
            raise InvalidPromptError("the prompt has neither text nor token ids")
        return text, None if token_ids is None else list(token_ids), cache_salt

    def _check_params(self, params: SamplingParams) -> None:
        """What only this model and this engine can refuse."""
        max_num_seqs = self.plan.config.scheduler.max_num_seqs
        if params.n > max_num_seqs:
            raise InvalidParamsError(f"n={params.n}: this engine runs at most max_num_seqs={max_num_seqs} at once")
        for token_id in params.stop_token_ids or ():
            if token_id >= self.model_config.vocab_size:
                raise InvalidParamsError(
                    f"stop_token_ids has {token_id}: this model's token ids end at {self.model_config.vocab_size - 1}"
                )

    def _draws(self, params: SamplingParams) -> tuple[Draw, ...]:
        """One for each sample, with the request's own seed or one drawn from the engine's by order of arrival."""
        seed = params.seed
        if seed is None:
            seed = uniform_bits(random_key(self.plan.config.seed, 0), self._num_requests)
        how = (params.temperature, max(0, params.top_k), params.top_p)
        return tuple(Draw(*how, random_key(seed, index), index) for index in range(params.n))

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
