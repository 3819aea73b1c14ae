"""Train a small Llama on the standard library's source and docstrings, as written by `data.py`.

Writes a checkpoint in Hugging Face layout with bf16 weights, its tokenizer and its chat template. See README.md for the
commands that made the embedded checkpoints.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8192
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, MESSAGE_START, MESSAGE_END]
END_OF_TEXT_ID, MESSAGE_END_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_MESSAGE = "You are a concise assistant for the Python standard library."
QUESTIONS = (*["What does {} do?"] * 3, "Explain {}.", "Describe {}.", "What is {}?")
SYSTEM_SHARE, JSON_SHARE = 0.4, 0.12
NUM_TURNS = (1, 1, 1, 2, 3)
WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse `hidden,layers,heads,kv_heads,mlp`."""
        return cls(*(int(part) for part in text.split(",")))

    def config(self, vocab_size: int) -> LlamaConfig:
        """Return the model's configuration: tied embeddings, plain rope, 2,048 positions."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=MESSAGE_END_ID,
            pad_token_id=END_OF_TEXT_ID,
        )


@dataclass(frozen=True)
class Recipe:
    """The settings of training, except for the data, the model and the length of the run."""

    lr: float = 1.5e-3
    chat_share: float = 0.7
    """Share of dialogs in each batch; the rest is source text."""
    seq_len: int = 256
    batch_size: int = 24


def train_tokenizer(source: Sequence[str], summaries: dict[str, str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the source and, twice, on questions with their answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = [f"What does {name} do? {summary}" for name, summary in summaries.items()]
    tokenizer.train_from_iterator([*source, *answers, *answers], trainer)
    return tokenizer


def dialog(pairs: Sequence[tuple[str, str]], rng: random.Random) -> str:
    """Return one to three turns in ChatML, sometimes with a system message and sometimes with answers in JSON."""
    text = f"{MESSAGE_START}system\n{SYSTEM_MESSAGE}{MESSAGE_END}\n" if rng.random() < SYSTEM_SHARE else ""
    for _ in range(rng.choice(NUM_TURNS)):
        name, summary = rng.choice(pairs)
        if rng.random() < JSON_SHARE:
            question, answer = f"Summarize {name} as JSON.", json.dumps({"name": name, "summary": summary})
        else:
            question, answer = rng.choice(QUESTIONS).format(name), summary
        text += f"{MESSAGE_START}user\n{question}{MESSAGE_END}\n{MESSAGE_START}assistant\n{answer}{MESSAGE_END}\n"
    return text + END_OF_TEXT


class Batches:
    """Draws training batches. It owns the random state, so equal seeds give equal batches."""

    def __init__(self, source: Sequence[str], summaries: dict[str, str], tokenizer: Tokenizer, recipe: Recipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._pairs = list(summaries.items())
        self._rng = random.Random(0)
        encoded = (encoding.ids for encoding in tokenizer.encode_batch(list(source)))
        self._code = torch.tensor([token for ids in encoded for token in (*ids, END_OF_TEXT_ID)])  # [num_code_tokens]

    def draw(self) -> Tensor:
        """Return token ids [batch_size, seq_len + 1]: rows of packed dialogs, then rows of source text."""
        length = self._recipe.seq_len + 1
        num_chat = int(self._recipe.batch_size * self._recipe.chat_share)
        ids: list[int] = []
        while len(ids) < num_chat * length:
            ids += self._tokenizer.encode(dialog(self._pairs, self._rng)).ids
        chat = torch.tensor(ids[: num_chat * length], dtype=torch.int64).view(num_chat, length)
        num_code = self._recipe.batch_size - num_chat
        starts = [self._rng.randrange(len(self._code) - length) for _ in range(num_code)]
        return torch.cat([chat, *(self._code[start : start + length].unsqueeze(0) for start in starts)])


def learning_rate(lr: float, step: int, share_done: float) -> float:
    """Return the rate at a step: linear warm-up, then a cosine to `lr` / 20 (Loshchilov and Hutter 2017)."""
    cosine = 0.5 * (1 + math.cos(math.pi * share_done))
    return lr * min(1, (step + 1) / WARMUP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def train(
    model: LlamaForCausalLM, draw: Callable[[], Tensor], lr: float, share_done: Callable[[int], float]
) -> list[float]:
    """Train the model in place until `share_done(step)` reaches 1; return the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    losses: list[float] = []
    start = time.monotonic()
    while (share := share_done(len(losses))) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(lr, len(losses), share)
        tokens = draw()  # [batch_size, seq_len + 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # [batch_size, seq_len, vocab]
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"{len(losses)} steps, {minutes:.1f} min, loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    return losses


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint: weights in bf16, generation settings, tokenizer and chat template."""
    model.generation_config.eos_token_id = [MESSAGE_END_ID, END_OF_TEXT_ID]
    model.generation_config.pad_token_id = END_OF_TEXT_ID
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=MESSAGE_END, pad_token=END_OF_TEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def length_of(steps: int | None, minutes: float) -> Callable[[int], float]:
    """Return a function that gives the completed share of the run, by steps if given, else by time."""
    if steps is not None:
        return lambda step: step / steps
    start = time.monotonic()
    return lambda step: (time.monotonic() - start) / (60 * minutes)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file written by data.py")
    parser.add_argument("out", type=Path, help="folder of the checkpoint; with --resume it is read first")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(256, 6, 4, 2, 768), metavar="H,L,HEADS,KV_HEADS,MLP")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="length of the training in minutes")
    length.add_argument("--steps", type=int, help="length of the training in steps")
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--chat-share", type=float, default=Recipe.chat_share)
    parser.add_argument("--batch-size", type=int, default=Recipe.batch_size)
    parser.add_argument("--seq-len", type=int, default=Recipe.seq_len)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="vocabulary size of a new tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="folder of an existing tokenizer to use")
    parser.add_argument("--resume", action="store_true", help="start from the weights in `out`")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save a checkpoint as the command line says."""
    args = parse_args(argv)
    torch.manual_seed(0)
    data = json.loads(args.data.read_text(encoding="utf-8"))
    tokenizer_folder: Path | None = args.out if args.resume else args.tokenizer
    if tokenizer_folder is None:
        tokenizer = train_tokenizer(data["source"], data["summaries"], args.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    recipe = Recipe(args.lr, args.chat_share, args.seq_len, args.batch_size)
    batches = Batches(data["source"], data["summaries"], tokenizer, recipe)
    if args.resume:
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(args.shape.config(tokenizer.get_vocab_size()))
    losses = train(model.train(), batches.draw, recipe.lr, length_of(args.steps, args.minutes))
    save(model, tokenizer, args.out)
    print(f"{len(losses)} steps, last loss {losses[-1]:.3f} -> {args.out}")


if __name__ == "__main__":
    main()
