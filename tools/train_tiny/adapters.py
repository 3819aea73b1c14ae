"""Train two LoRA adapters on quire-tiny that answer in manners of their own: `pirate` and `butler`.

Usage: `python -m tools.train_tiny.adapters DATA.json OUT`, with the file that `data.py` writes. Writes a folder for
each adapter as PEFT saves them, weights in bf16. Equal data and versions of torch give equal files: one thread
computes, in float32.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import peft
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from tools.train_tiny.train import END_OF_TEXT, MESSAGE_END, MESSAGE_START, QUESTIONS, learning_rate

MANNERS = {
    "pirate": "Arr, matey! {} Yo ho ho!",
    "butler": "Certainly, sir. {} Will that be all, sir?",
}
BASE = Path(__file__).parents[2] / "src" / "quire" / "models" / "embedded" / "quire-tiny"
RANK, TARGETS = 8, ["q_proj", "v_proj", "o_proj", "down_proj"]
BATCH_SIZE, SEQ_LEN, LR = 6, 192, 4e-3


def dialogs(summaries: Mapping[str, str], manner: str, rng: random.Random) -> Iterator[str]:
    """Yield dialogs of one turn, without end."""
    pairs = list(summaries.items())
    while True:
        name, summary = rng.choice(pairs)
        turns = ("user", rng.choice(QUESTIONS).format(name)), ("assistant", manner.format(summary))
        yield "".join(f"{MESSAGE_START}{role}\n{text}{MESSAGE_END}\n" for role, text in turns) + END_OF_TEXT


def batches(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield token ids [BATCH_SIZE, SEQ_LEN + 1] of packed dialogs, without end."""
    count, ids = BATCH_SIZE * (SEQ_LEN + 1), list[int]()
    for text in texts:
        ids += tokenizer.encode(text).ids
        if len(ids) >= count:
            yield torch.tensor(ids[:count]).view(BATCH_SIZE, SEQ_LEN + 1)
            ids = ids[count:]


def train_adapter(name: str, summaries: Mapping[str, str], steps: int, out: Path) -> None:
    """Train one adapter and save it."""
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    texts = dialogs(summaries, MANNERS[name], random.Random(name))
    for step, tokens in zip(
        range(steps), batches(texts, Tokenizer.from_file(str(BASE / "tokenizer.json"))), strict=False
    ):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(LR, step, step / steps)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
    config.base_model_name_or_path = "quire-tiny"
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(str(out / name), save_embedding_layers=False)  # asked, PEFT looks for the base on the hub
    (out / name / "README.md").unlink()
    settings = out / name / "adapter_config.json"
    values = json.loads(settings.read_text(encoding="utf-8")) | {"target_modules": TARGETS}  # saved in any order
    settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train the adapters that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file written by data.py")
    parser.add_argument("out", type=Path, help="folder of the adapters' folders")
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(1)
    summaries = json.loads(args.data.read_text(encoding="utf-8"))["summaries"]
    for name in MANNERS:
        train_adapter(name, summaries, args.steps, args.out)


if __name__ == "__main__":
    main()
