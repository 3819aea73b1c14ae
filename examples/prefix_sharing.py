"""Show with numbers how much work a common beginning of prompts saves.

    python prefix_sharing.py [MODEL]

Twelve questions about one long text are asked twice: with the prefix cache, and without it.
"""

import sys
import time

from quire import LLM, SamplingParams

TEXT = "json.dumps serializes an object to a JSON formatted text. os.replace renames a file or a directory. " * 10
QUESTIONS = [f"Question {i}: what does json.dumps do?" for i in range(12)]


def run(model: str, *, enable_prefix_caching: bool) -> list[str]:
    llm = LLM(model=model, max_model_len=2048, enable_prefix_caching=enable_prefix_caching)
    conversations = [[{"role": "system", "content": TEXT}, {"role": "user", "content": text}] for text in QUESTIONS]
    start = time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    print(f"prefix cache {'on ' if enable_prefix_caching else 'off'}: {num_tokens} prompt tokens, "
          f"{num_cached} of them from the cache, {num_tokens - num_cached} computed; {seconds:.2f} s")  # fmt: skip
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
    with_cache = run(model, enable_prefix_caching=True)
    without = run(model, enable_prefix_caching=False)
    print("the answers are", "the same" if with_cache == without else "different")


if __name__ == "__main__":
    main()
