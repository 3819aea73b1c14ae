"""Run several requests at once in an asyncio program, and stop one of them early.

    python async_llm.py [MODEL]

AsyncLLM runs the engine in a process of its own, so the event loop stays free for other work.
"""

import asyncio
import sys

from quire import AsyncLLM, EngineArgs, SamplingParams


async def ask(llm: AsyncLLM, name: str, max_pieces: int | None = None) -> str:
    """Return an answer, or only its beginning: leaving the loop ends the request in the engine too."""
    params = SamplingParams(temperature=0, max_tokens=64, output_kind="delta")
    prompt = llm.chat_prompt([{"role": "user", "content": f"What does {name} do?"}])
    pieces = []
    outputs = llm.generate(prompt, params, request_id=name)
    try:
        async for output in outputs:
            pieces.append(output.outputs[0].text)
            if len(pieces) == max_pieces:
                break
    finally:
        await outputs.aclose()
    return "".join(pieces)


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
    llm = await AsyncLLM.from_args(EngineArgs(model=model, max_model_len=1024))
    try:
        answers = await asyncio.gather(
            ask(llm, "json.dumps"), ask(llm, "os.replace"), ask(llm, "shutil.copyfile", max_pieces=3)
        )
        print(*answers, sep="\n")
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
