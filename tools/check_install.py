"""Check an installed Quire: the native kernels load, and the embedded checkpoint generates an answer.

The wheel build runs this on every platform, outside the source tree; it needs only the package.
"""

import importlib
import sys

from quire import LLM, SamplingParams, kernels

QUESTION = "What does json.dumps do?"


def main() -> int:
    """Print the kernels and the answer; the exit status is 1 if the kernels are not native or the answer is empty."""
    importlib.import_module("quire._native")
    (output,) = LLM(kv_cache_memory="16MiB").chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
    )
    answer = output.outputs[0].text
    print(f"kernels: {kernels.isa()}, {kernels.num_threads()} threads\n{QUESTION}\n{answer}")
    return int(kernels.isa() == "reference" or not answer.strip())


if __name__ == "__main__":
    sys.exit(main())
