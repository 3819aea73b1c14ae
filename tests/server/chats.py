"""A conversation, a tool and a call of it, and streams put together, for tests of chats."""

from quire.server.api.chat.events import UsageEvent
from quire.server.api.shared.fields import Usage

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def used(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> UsageEvent:
    """The event with this usage."""
    return UsageEvent(Usage.of(prompt_tokens, completion_tokens, cached_tokens))


def added_up(chunks):
    """Choices as a client puts them together."""
    choices = {}
    for chunk in chunks:
        (delta,) = chunk["choices"]
        message = {"role": "assistant", "content": "", "refusal": None, "reasoning": None}
        blank = {"index": delta["index"], "message": message, "logprobs": None, "finish_reason": None}
        is_first = delta["index"] not in choices
        choice = choices.setdefault(delta["index"], blank)
        assert choice["finish_reason"] is None
        assert ("role" in delta["delta"]) == is_first
        message = choice["message"]
        for key in ("content", "reasoning_content", "reasoning"):
            if key in delta["delta"]:
                message[key] = (message.get(key) or "") + delta["delta"][key]
        for call in delta["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                function = {"name": call["function"]["name"], "arguments": ""}
                calls.append({"id": call["id"], "type": call["type"], "function": function})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if delta["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += delta["logprobs"]["content"]
        if "token_ids" in delta:
            choice["token_ids"] = choice.get("token_ids", []) + delta["token_ids"]
        choice["finish_reason"] = delta["finish_reason"]
        choice["stop_reason"] = delta.get("stop_reason")
    for choice in choices.values():
        if not choice["message"]["content"] and "tool_calls" in choice["message"]:
            choice["message"]["content"] = None
    return [choices[index] for index in sorted(choices)]


def same_ids(message, expected):
    """Ids of calls are drawn."""
    for one in (message, expected):
        for i, call in enumerate(one.get("tool_calls", ())):
            assert call["id"].startswith("call_")
            call["id"] = str(i)
