"""Talk with a model in the terminal. Each answer appears while it is generated.

    python terminal_chat.py [MODEL]

An empty line or Ctrl-D ends the conversation. `quire chat` does the same and more; this shows how it is done.
"""

import itertools
import sys

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "quire-tiny", max_model_len=2048)
    # `delta`: each output has only the text that is new since the one before.
    params = SamplingParams(temperature=0, max_tokens=200, output_kind="delta")
    messages = []
    for number in itertools.count():
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if not question:
            return
        messages.append({"role": "user", "content": question})
        # LLM.chat returns when an answer is complete. To print it token by token, add the request to the engine and
        # call `step` until the engine has no request left.
        llm.engine.add_request(f"turn-{number}", llm.chat_prompt(messages), params)
        answer = ""
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                if output.error:
                    sys.exit(output.error)
                print(output.outputs[0].text, end="", flush=True)
                answer += output.outputs[0].text
                cached = output.num_cached_tokens
        print(f"\n  [{cached} tokens of this prompt came from the cache]")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
