"""JSON in any form ends by itself: white space, which a schema allows anywhere, is bounded by default."""

import json
import random
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams

NAMES = ["name", "age", "city", "tags", "score", "active", "items", "price", "count", "owner", "date", "title"]
NUM_SCHEMAS, MAX_TOKENS = 100, 256


def random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum"] + ["array", "object"] * (depth < 2)
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": rng.choice([8, 16, 24])}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": rng.choice([9, 100, 10_000])}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": rng.sample(NAMES, 3)}
        case "array":
            return {"type": "array", "items": random_value(rng, depth + 1), "maxItems": 3}
        case _:
            return random_object(rng, depth + 1)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: random_value(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


@pytest.mark.slow
def test_nearly_all_answers_at_temperature_1_end_by_themselves() -> None:
    rng = random.Random(0)
    schemas = [random_object(rng) for _ in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, seed=i, structured_outputs=StructuredOutputsParams(json=schema))
        for i, schema in enumerate(schemas)
    ]
    llm = LLM("quire-tiny", kv_cache_memory="32MiB", max_model_len=1024, num_threads=1)
    outputs = llm.generate(["Answer in JSON: "] * NUM_SCHEMAS, params, use_tqdm=False)
    ended = [
        (output, schema)
        for output, schema in zip(outputs, schemas, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ]
    assert len(ended) >= 0.98 * NUM_SCHEMAS
    for output, schema in ended:
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
