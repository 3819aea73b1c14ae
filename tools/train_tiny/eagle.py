"""Train an EAGLE head (arXiv 2401.15077) for quire-tiny.

Usage: `python -m tools.train_tiny.eagle DATA.json OUT --minutes 8`, with the file that `data.py` writes. Writes the
head in the authors' format, weights in bf16. Training ends after the given time, so no run repeats another bitwise.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tools.train_tiny.train import Batches, Recipe, learning_rate, length_of

BASE = Path(__file__).parents[2] / "src" / "quire" / "models" / "embedded" / "quire-tiny"
RECIPE = Recipe(lr=2e-3, chat_share=0.9, seq_len=128, batch_size=4)
STATES_WEIGHT = 0.1
"""Of the distance between hidden states, beside that between distributions."""
NUM_PASSES = 2
"""Passes that are trained: the later ones read what the head itself gave, as when it drafts."""


class EagleHead(nn.Module):
    """From the state of each token and the token behind it, the state of the latter."""

    def __init__(self, base: LlamaForCausalLM) -> None:
        super().__init__()
        width = base.config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(base.config, 0)])
        self.layers[0].load_state_dict(base.model.layers[-1].state_dict())  # learns faster than from random numbers
        self.layers[0].input_layernorm = nn.Identity()
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = base.model.rotary_emb.forward

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """embeddings, states [num_texts, length, width] -> as these."""
        x = self.fc(torch.cat([embeddings, states], dim=-1))
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        places = torch.arange(length)[None]
        out: Tensor = self.layers[0](x, attention_mask=mask, position_embeddings=self._rotary(x, places))
        return out


def losses(head: EagleHead, base: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, float]:
    """The loss for tokens [num_texts, length], and how often the head's likeliest token is the model's in the first
    pass."""
    with torch.no_grad():
        out = base(input_ids=tokens, output_hidden_states=True, use_cache=False)
        states = out.hidden_states[-1]  # [num_texts, length, width]
        expected = out.logits[:, 1:].float().log_softmax(-1)
        embeddings = base.model.embed_tokens(tokens[:, 1:])
    loss, read, share = torch.zeros(()), states[:, :-1], 0.0
    for number in range(NUM_PASSES):
        found = head(embeddings, read)  # [num_texts, length - 1, width]
        logits = base.lm_head(found).float().log_softmax(-1)
        loss = loss + torch.nn.functional.kl_div(logits, expected, log_target=True, reduction="none").sum(-1).mean()
        loss = loss + STATES_WEIGHT * torch.nn.functional.smooth_l1_loss(found, states[:, 1:])
        share = share or (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
        read = torch.cat([states[:, : number + 1], found[:, number:-1]], dim=1)
    return loss, share


def save(head: EagleHead, base: LlamaForCausalLM, out: Path) -> None:
    """Write weights and config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, out / "model.safetensors")
    config = base.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, help="in the place of a time")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    base = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32).requires_grad_(False)
    data = json.loads(args.data.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    batches, head = Batches(data["source"], data["summaries"], tokenizer, RECIPE), EagleHead(base)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RECIPE.lr, betas=(0.9, 0.95), weight_decay=0.01)
    share_done, step = length_of(args.steps, args.minutes), 0
    while (done := share_done(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(RECIPE.lr, step, done)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, share = losses(head, base, batches.draw())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            print(f"{step} steps: loss {loss.item():.3f}, the model's likeliest token in {share:.0%}", flush=True)
    save(head, base, args.out)


if __name__ == "__main__":
    main()
