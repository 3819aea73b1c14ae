"""Whether Quire gives texts the token ids that llama.cpp gives them: python -m benchmarks.tokenization MODEL.gguf

The texts are made up of characters of all scripts, words, numbers, white space, special tokens and replacement
characters, from a fixed seed. Prints how many were equal, and the first that were not, as JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.peers import ROOT, LlamaCpp
from quire.config.model import ModelConfig
from quire.text.tokenizer.tokenizer import Tokenizer

_PLAIN = (
    "the", "Hello", "don't", "I'LL", "we've", "na\u00efve", "12", "3.14159", "2026", ".", "...", "!?", "(x)", "{}", "://",
    "_", "f(x):", "\n", "\n\n", "\t", " ", "   ", "\r\n", "\u00a0", "\u3000", "\u00df", "\u0130", "\ufb01", "e\u0301",
    "\u200d", "\ufffd", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
)  # fmt: skip


def make_texts(number: int, specials: Sequence[str], seed: int = 0) -> list[str]:
    """The texts: each of 1 to 24 pieces."""
    draw = random.Random(seed)
    categories = ("L", "M", "N", "P", "S", "Z")
    characters = [chr(i) for i in range(32, 0x2FA20) if unicodedata.category(chr(i))[0] in categories]
    scripts = [characters[i : i + 64] for i in range(0, len(characters), 64)]
    texts = []
    for _ in range(number):
        script = draw.choice(scripts)
        pieces = []
        for _ in range(draw.randint(1, 24)):
            kind = draw.random()
            if kind < 0.45:
                pieces.append("".join(draw.choices(script, k=draw.randint(1, 6))))
            elif kind < 0.9:
                pieces.append(draw.choice(_PLAIN) + draw.choice(("", " ")))
            elif kind < 0.95 or not specials:
                pieces.append(bytes(draw.choices(range(256), k=draw.randint(1, 8))).decode("utf-8", errors="replace"))
            else:
                pieces.append(draw.choice(specials))
        texts.append("".join(pieces))
    return texts


def main() -> int:
    """Compare, print, and return 1 if a text has other ids."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenization", description=__doc__)
    parser.add_argument("model", help="GGUF file, or a folder with one")
    parser.add_argument("--texts", type=int, default=10_000, help="number of texts")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "benchmarks", help="of llama.cpp's environment")
    options = parser.parse_args()
    config = ModelConfig.resolve(options.model)
    tokenizer = Tokenizer.from_path(config.tokenizer_path)
    texts = make_texts(options.texts, [text for _, text in sorted(tokenizer.special_token_texts.items())])
    engine = LlamaCpp(options.folder)
    engine.install()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given, out = Path(folder) / "texts.json", Path(folder) / "ids.json"
        given.write_text(json.dumps(texts), encoding="utf-8")
        engine.run_driver("llama_cpp_tokens", config.path, given, out)
        theirs = json.loads(out.read_text())
    different = [
        {"text": text, "quire": ours, "llama.cpp": its}
        for text, its in zip(texts, theirs, strict=True)
        if (ours := tokenizer.encode(text, add_special_tokens=False)) != its
    ]
    print(json.dumps({"texts": len(texts), "equal": len(texts) - len(different), "first_different": different[:5]}))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
