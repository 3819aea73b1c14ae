"""Benchmark of a step's bookkeeping: the real scheduler, block manager and commit, with random tokens and no model.

Times are those of the thread's CPU clock, so other programs do not count.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

from quire.cli.bench.throughput import greedy
from quire.common.batch import Draw, StepResult
from quire.common.progress import tracked
from quire.config.kv_cache import FullAttentionSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.kv.block_space_manager import BlockSpaceManager

_PROMPT_LEN, _NUM_STEPS, _VOCAB = 256, 200, 151936


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of decoding sequences and each number of waiting requests."""
    for num_seqs, num_waiting in tracked([*product(options.num_seqs, options.waiting)], "scheduler"):
        rng, clock = random.Random(0), time.thread_time
        spec = FullAttentionSpec(1, 2, "float32")  # any: block accounting uses no tensors
        config = kv_cache_config([spec], 16, num_blocks=num_seqs * (_PROMPT_LEN + _NUM_STEPS) // 8)
        blocks = BlockSpaceManager(config, enable_prefix_caching=True)
        scheduler = Scheduler(SchedulerConfig(num_seqs, num_seqs * _PROMPT_LEN), blocks)
        committer = Committer(scheduler.requests, max_model_len=2**20)
        prompts = [rng.choices(range(_VOCAB), k=_PROMPT_LEN) for _ in range(num_seqs)]
        prompts += [rng.choices(range(_VOCAB), k=4) for _ in range(num_waiting)]
        start, params = clock(), greedy(_NUM_STEPS)
        for prompt in prompts:
            seq = Sequence(scheduler.requests.new_seq_id(), prompt, (Draw(0.0, 0, 1.0, b""),), SampleOutput(params))
            scheduler.requests.add(SequenceGroup(OutputBuilder(str(seq.seq_id), prompt, params, 0.0), seq))
        times = {"add": [(clock() - start) / len(prompts)], "schedule": [], "commit": []}
        for _ in range(_NUM_STEPS - 1):
            start = clock()
            batch = scheduler.schedule()
            times["schedule"].append(clock() - start)
            result = StepResult(tuple(rng.choices(range(_VOCAB), k=num_seqs)))
            start = clock()
            committer.commit(batch, result)
            times["commit"].append(clock() - start)
        medians = {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in times.items()}
        yield {"num_seqs": num_seqs, "num_waiting": num_waiting} | medians
