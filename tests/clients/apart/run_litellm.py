"""LiteLLM: chats whole, streamed and asynchronous, through each of the server's APIs, completions and errors."""

import asyncio
import contextlib
import io

import litellm
from target import KEY, MODEL, QUESTION, URL, report

litellm.suppress_debug_info = True
BASES = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
CHAT = {"messages": QUESTION, "temperature": 0, "api_key": KEY}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"}


def through(provider: str) -> list[str]:
    """The answer as a whole and as a stream."""
    asked = {"model": f"{provider}/{MODEL}", "api_base": BASES[provider], **CHAT}
    whole = litellm.completion(**asked).choices[0].message.content
    return [whole, "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))]


async def asynchronously() -> list[str]:
    whole = await litellm.acompletion(**OPENAI, **CHAT)
    stream = await litellm.acompletion(**OPENAI, **CHAT, stream=True)
    return [whole.choices[0].message.content, "".join([part.choices[0].delta.content or "" async for part in stream])]


def embedding_error() -> list[object]:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            litellm.embedding(**OPENAI, api_key=KEY, input=["a"])
        except litellm.BadRequestError as error:
            return [error.status_code, error.message]
    return []


report(
    answers={provider: through(provider) for provider in BASES},
    asynchronous=asyncio.run(asynchronously()),
    completion=litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, prompt="import", max_tokens=4
    ).usage.completion_tokens,
    embedding=embedding_error(),
)
