"""Load a checkpoint and print the time and the memory that it took: `ready CHECKPOINT`.

Memory is that of anonymous pages: weights packed for the kernels, and all other allocations. Pages of mapped files
belong to the page cache and do not count. The KV cache is small here.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path

_EVERY_S = 0.005


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def main() -> None:
    """Load the checkpoint and record the peak of memory meanwhile."""
    import torch  # first, so that its memory and time do not count

    from quire import LLM

    torch.ones(1)
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_EVERY_S):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    llm = LLM(sys.argv[1], dtype="bfloat16", num_gpu_blocks_override=64)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    after = anonymous_bytes()
    weight_bytes = llm.engine.plan.weight_bytes
    found = {"seconds": seconds, "memory_bytes": after - before, "peak_bytes": max(peak, after) - before}
    print(json.dumps(found | {"weight_bytes": weight_bytes}))


if __name__ == "__main__":
    main()
