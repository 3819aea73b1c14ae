"""Patterns of checkpoints match what `re` matches, and none takes long."""

import random
import re
import time

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.name_patterns import MAX_STEPS, NamePatterns

ATOMS = ("a", "b", "0", r"\.", ".", "[ab]", "[^a.]", "[a-c0-9]", r"\d", r"\D", r"\w", r"\s", "^", "$", r"\A", r"\Z",
         r"\b", r"\B", "[^\\d]", r"[\W0]", "", ".*", "[ab]+?", r"[^\W0]{2,}")  # fmt: skip
REPEATS = ("", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{2,}", "{0}", "{0,3}?")


def make_pattern(draw: random.Random, depth: int = 2) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(ATOMS)
    branches = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        parts = []
        for _ in range(draw.choice((1, 1, 2))):
            inner = make_pattern(draw, depth - 1)
            parts.append(f"({draw.choice(('', '?:', '?=', '?!'))}{inner}){draw.choice(REPEATS)}")
        branches.append("".join(parts))
    return "|".join(branches)


def test_what_matches_is_what_re_matches() -> None:
    draw = random.Random(1)
    names = ["a", "b.a", "model.0.a", "ab0.ba", "aab.b0b.", "\n", "a\n", ".", "a b", "ab\u0664", "0.ab_b"]
    num_matches = 0
    for _ in range(400):
        text = make_pattern(draw)
        pattern = NamePatterns().compile("x", text)
        for name in draw.sample(names, 6):
            starts = re.match(text, name) is not None
            ends = re.fullmatch(rf"(?:[\s\S]*\.|\A)(?:{text})", name) is not None
            assert pattern.starts(name) == starts, (text, name)
            assert pattern.ends(name) == ends, (text, name)
            num_matches += starts + ends
    assert 1_000 < num_matches < 4_000


@pytest.mark.parametrize(
    ("text", "starting", "ending"),
    [
        ("model.layers.1", "model.layers.10", "x.model.layers.1"),
        (r"layers\.1\.q", "layers.1.q_proj", "model.layers.1.q"),
        (r".*self_attn.(q|k|v)_proj$", "layers.0.self_attn.k_proj", "layers.0.self_attn.k_proj"),
        (r"^(?!.*lm_head).*proj", "layers.q_proj", "layers.q_proj"),
        (r".*\.(?:1[0-9]|2[0-3])\..*up.*", "model.layers.12.up_proj", "model.layers.23.up_proj"),
        ("q_proj|k_proj", "q_proj.x", "layers.k_proj"),
    ],
)
def test_patterns_as_checkpoints_have_them(text: str, starting: str, ending: str) -> None:
    pattern = NamePatterns().compile("x", text)
    assert pattern.starts(starting)
    assert pattern.ends(ending)
    assert not pattern.starts("lm_head")
    assert not pattern.ends("lm_head")


@pytest.mark.parametrize(
    "text",
    [
        "([^x]|[^y])" * 25 + "!",
        "(.+)+!",
        "((((.*)*)*)*)*!",
        ".?" * 900 + "." * 50 + "!",
        "(a?){4000000000}!",
        "(.{1,60}){1,60}!",
        "(.*(?!.*!))*!",
        "(a|aa)+" * 20 + "!",
        ".*" * 900 + "!",
    ],
)
def test_patterns_that_take_backtracking_for_ever_are_matched_at_once(text: str) -> None:
    pattern, start_s = NamePatterns().compile("x", text), time.process_time()
    for name in ("model.layers.11.self_attn.q_proj", "a" * 64):
        assert not pattern.starts(name)
        assert not pattern.ends(name)
    assert time.process_time() - start_s < 2


def test_all_patterns_of_a_file_share_a_limit() -> None:
    patterns = NamePatterns(max_steps=22)
    first, second = (patterns.compile(source, ".*a") for source in "pq")
    for name in ("b" * 30, "b" * 40):
        assert not first.starts(name)
        assert not second.ends(name)
    with pytest.raises(UnsupportedModelError, match="q has patterns that take too long to match"):
        second.starts("b" * 30)


@pytest.mark.parametrize("text", ["[^{}]", "a|"])
def test_the_limit_counts_what_takes_long(text: str) -> None:
    """Tests of characters, and names themselves, beside the parts of patterns."""
    patterns = NamePatterns(max_steps=50_000)
    made = [patterns.compile("x", text.format(number)) for number in range(10)]
    names = (f"model.layers.{number}.block_sparse_moe.experts.{number}.gate_proj" for number in range(1000))
    with pytest.raises(UnsupportedModelError, match="take too long"):
        [pattern.starts(name) for name in names for pattern in made]


def test_usual_patterns_may_be_matched_with_as_many_modules_as_the_largest_models_have() -> None:
    num_names = 2000
    patterns = NamePatterns(MAX_STEPS * num_names // 60_000)
    texts = (
        r".*lm_head",
        ".*self_attn.*",
        r".*mlp.gate$",
        ".*shared_experts.*",
        r".*\.(q|k|v|o)_proj$",
        r"\d+.mlp.gate",
    )
    made = [patterns.compile("x", text) for text in texts]
    for number in range(num_names):
        name = f"model.layers.{number % 90}.mlp.experts.{number}.gate_proj"
        assert not any(pattern.starts(name) for pattern in made)


def test_patterns_of_a_file_have_a_limited_length_together() -> None:
    patterns = NamePatterns()
    for number in range(2000):
        patterns.compile("x", rf"model\.layers\.{number}\.self_attn\.q_proj" + "_" * 100)  # without choices
    for _ in range(32):
        patterns.compile("x", ".*" * 1000)
    patterns.compile("x", ".*" * 768)
    with pytest.raises(UnsupportedModelError, match="x: patterns of more than 65,536 characters together"):
        patterns.compile("x", ".*")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("(", CheckpointError, r"^x has the pattern '\(': missing \)"),
        ("*", CheckpointError, "nothing to repeat"),
        ("a{99999999999999999999}", CheckpointError, "repetition|repeat"),
        (r"(a)\1", UnsupportedModelError, "back references, look-behind, atomic groups and flags are not supported"),
        ("(?<=a)b", UnsupportedModelError, "look-behind"),
        ("(?<!a)b", UnsupportedModelError, "look-behind"),
        ("(?>a)b", UnsupportedModelError, "atomic groups"),
        ("(?i)a", UnsupportedModelError, "flags"),
        ("(?s:a)", UnsupportedModelError, "flags"),
        ("(?-i:a)", UnsupportedModelError, "flags"),
        ("a" * 2001, UnsupportedModelError, "at most 2,000 characters and 100 groups"),
        ("(a)" * 101, UnsupportedModelError, "at most 2,000 characters and 100 groups"),
        ("(" * 100 + "a" + ")" * 100, None, ""),
        ("a" * 2000, None, ""),
        ("[[a]", None, ""),
    ],
)
def test_what_is_refused(text: str, error: type[Exception] | None, message: str) -> None:
    if error is None:
        assert NamePatterns().compile("x", text).starts("a" * 2000)
        return
    with pytest.raises(error, match=message):
        NamePatterns().compile("x", text)


def test_a_file_has_a_limited_number_of_patterns() -> None:
    patterns = NamePatterns()
    for _ in range(4096):
        patterns.compile("x", "a")
    with pytest.raises(UnsupportedModelError, match=r"x: more than 4,096 patterns"):
        patterns.compile("x", "a")
