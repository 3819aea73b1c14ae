"""An agent: a loop in which a model calls functions of this program until it can answer.

    quire serve --tool-parser hermes         # in another terminal
    python agent.py [--url http://127.0.0.1:8000/v1] [QUESTION]

It uses OpenAI's package (`pip install openai`). Its first call is forced, so that the loop can be seen with the
embedded model too, which was never trained to call functions. With a larger model, `--first auto` leaves it the choice.
"""

import argparse
import inspect
import json
import pydoc

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Return the first lines of the documentation of a Python function.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"enum": ["json.dumps", "os.replace", "shutil.copyfile"]}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    }
]


def look_up(name: str) -> str:
    """What the tool does. A name comes from a model, so it is checked like any other input."""
    if name not in TOOLS[0]["function"]["parameters"]["properties"]["name"]["enum"]:
        return f"error: there is no documentation of {name!r}"
    return inspect.getdoc(pydoc.locate(name))[:300]


FUNCTIONS = {"look_up": look_up}


def run_call(call) -> str:
    """The result of one call, as text. An error is a result too: the model may correct its call."""
    try:
        arguments = json.loads(call.function.arguments)
        function = FUNCTIONS[call.function.name]
        return function(**arguments)
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What does json.dumps do?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--first", choices=("auto", "required"), default="required")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": options.question}]
    choice = options.first
    for _ in range(5):  # a model that never stops calling must not run for ever
        message = (
            client.chat.completions.create(
                model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=60
            )
            .choices[0]
            .message
        )
        if not message.tool_calls:
            print("answer:", message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = run_call(call)
            print(f"call: {call.function.name}({call.function.arguments}) -> {result.splitlines()[0]}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "auto"
    print("no answer after five rounds")


if __name__ == "__main__":
    main()
