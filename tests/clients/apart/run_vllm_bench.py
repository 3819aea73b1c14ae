"""What `vllm bench serve` does for both endpoints, without vLLM's command line, which wants vLLM to be installed."""

import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    main(parser.parse_args([*sys.argv[1:], "--backend", backend, "--endpoint", endpoint]))
