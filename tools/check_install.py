"""Check an installed Quire where it will be used: the native kernels load, and the embedded checkpoint answers.

Run by the wheel build on every platform, outside the source tree; needs nothing but the package.
"""

import importlib
import sys

from quire import LLM, SamplingParams, kernels

QUESTION = "What does json.dumps do?"


def main() -> int:
    """Print what runs and what it says; 1 if the kernels are not native or the answer is empty."""
    importlib.import_module("quire._native")
    (output,) = LLM(kv_cache_memory="16MiB").chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
    )
    answer = output.outputs[0].text
    print(f"kernels: {kernels.isa()}, {kernels.num_threads()} threads\n{QUESTION}\n{answer}")
    return int(kernels.isa() == "reference" or not answer.strip())


if __name__ == "__main__":
    sys.exit(main())
