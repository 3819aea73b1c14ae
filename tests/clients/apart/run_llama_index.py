"""LlamaIndex: chats and completions, whole, streamed and asynchronous, and structured answers."""

import asyncio
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from target import KEY, MODEL, QUESTION, URL, report


class Entry(BaseModel, extra="forbid"):
    """What a name stands for."""

    kind: Literal["function", "class"]


def llm(**kwargs: object) -> OpenAILike:
    return OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, temperature=0, **{"max_tokens": 64} | kwargs)


messages = [ChatMessage(**message) for message in QUESTION]
chat = llm(is_chat_model=True)
text = llm(max_tokens=8)


async def asynchronously() -> list[str]:
    whole = (await chat.achat(messages)).message.content
    return [whole, "".join([part.delta async for part in await chat.astream_chat(messages)])]


def structured(**kwargs: bool) -> str:
    return llm(is_chat_model=True, **kwargs).as_structured_llm(Entry).chat(messages).raw.kind


report(
    chats=[chat.chat(messages).message.content, "".join(part.delta for part in chat.stream_chat(messages))],
    asynchronous=asyncio.run(asynchronously()),
    completions=[text.complete("import").text, "".join(part.delta for part in text.stream_complete("import"))],
    structured=[structured(is_function_calling_model=True), structured(should_use_structured_outputs=True)],
)
