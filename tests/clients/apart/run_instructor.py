"""Instructor: a pydantic model by each of its modes in which a grammar determines the answer's form."""

from typing import Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel
from target import KEY, MODEL, QUESTION, URL, report

MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


class Entry(BaseModel, extra="forbid"):
    """What a name stands for."""

    kind: Literal["function", "class"]
    is_public: bool


def made(client: OpenAI, mode: Mode) -> dict[str, object]:
    """What the model answers in a mode, at the first attempt."""
    completions = instructor.from_openai(client, mode=mode).chat.completions
    return completions.create(model=MODEL, messages=QUESTION, response_model=Entry, max_retries=0).model_dump()


with OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
    report(made={mode.name: made(client, mode) for mode in MODES})
