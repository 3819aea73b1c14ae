"""What the programs of this folder call, and how they hand over their results."""

import json
import sys

URL, KEY = sys.argv[2:]
MODEL = "quire-tiny"
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]


def report(**results: object) -> None:
    """Print what the test compares, after what the example printed."""
    print(f"\n{json.dumps(results)}")
