"""Requests to an engine whose model recites how long its prompt was."""

from typing import Any

from quire import LLM, SamplingParams

PROMPT = [5, 6, 7]


def generate(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]
