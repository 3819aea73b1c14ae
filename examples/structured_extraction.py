"""Extract the same fields from every text, as JSON that always fits a schema.

    python structured_extraction.py [MODEL]

The schema decides the form: it holds for every model. The values are as good as the model; the embedded model is far
too small for this task, so try one with a billion weights or more.
"""

import json
import sys

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 30},
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["product", "sentiment", "stars"],
    "additionalProperties": False,
}
REVIEWS = [
    "The kettle boils a litre in two minutes. Best purchase of the year!",
    "The headphones broke after a week, and the shop never answered.",
]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "quire-tiny", max_model_len=1024)
    structure = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=structure)
    prompts = [[{"role": "user", "content": f"Summarize this review as JSON.\n\n{review}"}] for review in REVIEWS]
    for output in llm.chat(prompts, params):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            print(f"cut off after max_tokens: {answer.text}")
        else:
            print(json.loads(answer.text))


if __name__ == "__main__":
    main()
