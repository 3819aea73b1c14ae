"""Change the model's scores before each token is chosen, with a function of your own.

    python logits_processors.py [MODEL]

The first answer is as usual. In the second one, tokens that contain a backquote cannot be chosen.
"""

import sys

from torch import Tensor

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "quire-tiny", max_model_len=512)
    tokenizer = llm.get_tokenizer()
    forbidden = [token_id for token_id in range(len(tokenizer)) if "`" in tokenizer.decode([token_id])]

    def without_backquotes(output_token_ids: list[int], logits: Tensor) -> Tensor:
        """Called for each token: with the tokens generated so far, and the scores [vocab] of the next one."""
        logits[forbidden] = float("-inf")
        return logits

    question = [{"role": "user", "content": "What does json.dumps do?"}]
    for processors in (None, [without_backquotes]):
        params = SamplingParams(temperature=0, max_tokens=32, logits_processors=processors)
        print(llm.chat(question, params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
