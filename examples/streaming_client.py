"""Stream an answer of a running server, with OpenAI's own Python package (`pip install openai`).

quire serve                      # in another terminal
python streaming_client.py [--url http://127.0.0.1:8000/v1] [--api-key KEY] [QUESTION]
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What does json.dumps do?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="a server without keys accepts any")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    main()
