"""Answer many questions in one batch, and write the answers to a CSV file.

    python offline_batch.py [--model MODEL] [--output FILE] [QUESTION ...]

All questions run at once. Their answers come back in the order of the questions.
"""

import argparse
import csv
import sys

from quire import LLM, SamplingParams

QUESTIONS = [f"What does {name} do?" for name in ("json.dumps", "os.replace", "shutil.copyfile", "math.gcd")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="quire-tiny")
    parser.add_argument("--output", help="file to write; without it, the answers are printed")
    options = parser.parse_args()

    llm = LLM(model=options.model, max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question in options.questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    # A prompt that is invalid, for example too long, has no answer. The others have one all the same.
    answers = [output.error or output.outputs[0].text for output in outputs]
    rows = list(zip(options.questions, answers, strict=True))
    if options.output is None:
        csv.writer(sys.stdout).writerows(rows)
    else:
        with open(options.output, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("question", "answer"), *rows])
        print(f"{len(rows)} answers are in {options.output}")


if __name__ == "__main__":
    main()
