"""Compare the time of a beam-search step with that of a step for the same number of independent samples.

    python tools/bench_beams.py [--model FOLDER] [--widths 2 4 8] [--max-tokens 128]

Prints one line of JSON per width: the median times of a step with all beams or samples running, and their ratio.
"""

import argparse
import json
import time
from statistics import median

from quire import LLM, BeamSearchParams, SamplingParams

PROMPT = list(range(100, 164))


def step_s(llm: LLM, params: SamplingParams | BeamSearchParams, width: int) -> float:
    """Return the median time of the steps that compute one token of each sequence of a request."""
    engine, times = llm.engine, []
    engine.add_request("bench", PROMPT, params)
    num_steps = engine.stats().num_steps
    while engine.has_unfinished_requests():
        is_decode = engine.stats().num_steps > num_steps and len(engine.requests.running[0].unfinished_seqs) == width
        start_s = time.perf_counter()
        engine.step()
        if is_decode:
            times.append(time.perf_counter() - start_s)
    return median(times)


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=len(PROMPT) + args.max_tokens, num_gpu_blocks_override=512)
    for width in args.widths:
        samples = SamplingParams(n=width, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
        beams = BeamSearchParams(width, args.max_tokens, ignore_eos=True)
        times = [(step_s(llm, samples, width), step_s(llm, beams, width)) for _ in range(3)]
        samples_s, beams_s = map(min, zip(*times, strict=True))
        row = {"beam_width": width, "samples_ms": samples_s * 1e3, "beams_ms": beams_s * 1e3}
        print(json.dumps({k: round(v, 3) for k, v in {**row, "ratio": beams_s / samples_s}.items()}), flush=True)


if __name__ == "__main__":
    main()
