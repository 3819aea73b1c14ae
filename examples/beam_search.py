"""Find the four likeliest answers to a question, with their log-probabilities.

python beam_search.py [MODEL]
"""

import sys

from quire import LLM, BeamSearchParams


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "quire-tiny", max_model_len=512)
    prompt = llm.chat_prompt([{"role": "user", "content": "What does json.dumps do?"}])
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=32))
    num_prompt_tokens = len(prompt["prompt_token_ids"])
    for sequence in output.sequences:  # the best first, by cum_logprob / length; each begins with the prompt
        text = llm.get_tokenizer().decode(sequence.tokens[num_prompt_tokens:])
        print(f"{sequence.cum_logprob:8.3f}  {text!r}")


if __name__ == "__main__":
    main()
