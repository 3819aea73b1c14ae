"""Texts of many scripts, to compare tokenizers on."""

# ruff: noqa: RUF001
import random

TEXTS = [
    "", " ", "  two  spaces ", "Hello, world! It's 12345 o'clock; WE'LL see.", "\r\n\t tabs\n\n\nlines \n",
    "Grüße aus Köln", "naïve café e\u0301", "Привет, мир 2024",
    "你好，世界。再见", "こんにちは世界 カタカナ", "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया १२३", "สวัสดีชาวโลก", "Γειά σου Κόσμε",
    "👋🏽 👨‍👩‍👧‍👦 🇩🇪", "x²+½≠∞ → ∑",
    "def f(x):\n    return x**2  # ok", "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|> <|im_end|>x<|endoftext|>", "\u0000\ufffd\U0010ffff",
]  # fmt: skip
SCRIPTS = [
    (0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0x20, 0x20), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF),
    (0x600, 0x6FF), (0x900, 0xDFF), (0xE00, 0xEFF), (0x1E00, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0xF900, 0xFFFD), (0x1F300, 0x1F6FF), (0x20000, 0x2A6DF),
]  # fmt: skip
"""Ranges of characters."""


def texts() -> list[str]:
    """TEXTS, and random mixtures of pieces of them."""
    rng = random.Random(3)
    pieces = [text[i : i + 9] for text in TEXTS for i in range(0, len(text), 3)]
    return TEXTS + ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(500)]


def many_texts(count: int = 2000) -> list[str]:
    """Also runs of the same character, and random characters of all scripts."""
    rng = random.Random(7)
    runs = [char * n for char in " a\n\t0" for n in (*range(1, 40), 300)]
    runs += ["\n" * n + " " * k + "x" for n in range(5) for k in range(6)]
    chars = ("".join(chr(rng.randint(*rng.choice(SCRIPTS))) for _ in range(rng.randint(1, 30))) for _ in range(count))
    return texts() + runs + list(chars)
