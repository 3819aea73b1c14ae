"""Named cases: what is asked, over HTTP or offline, and what may be answered."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.grammar.test_refused import HOSTILE
from tests.hostile.target import CHAT, COMPLETIONS

USER = [{"role": "user", "content": "Hi"}]
BASE = {COMPLETIONS: {"prompt": "Hi", "max_tokens": 2}, CHAT: {"messages": USER, "max_tokens": 2}}
NUL, BIDI, SURROGATE = "a\0b", "\u202e\u2066x", "\ud800"


@dataclass(frozen=True)
class Ask:
    """One request."""

    fields: dict[str, Any] = field(default_factory=dict)
    """over what a good request has"""
    statuses: tuple[int, ...] = (400,)
    words: str = ""
    """a pattern that a refusal's message must have"""
    path: str = COMPLETIONS
    raw: str | None = None
    """the body's JSON, where `fields` cannot say it"""
    is_online_only: bool = False
    """what is wrong is its JSON, or only a server limits it"""

    @property
    def body(self) -> bytes:
        text = json.dumps(BASE.get(self.path, {}) | self.fields) if self.raw is None else self.raw
        return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Case:
    """One of the list. `asks` are made in turn."""

    name: str
    asks: Iterable[Ask] | Callable[[], Iterable[Ask]]
    is_quick: bool = True
    """has its place in `make test`"""
    limit_s: float = 2.0
    """for each answer, on a machine of its own"""

    def __iter__(self) -> Iterator[Ask]:
        return iter(self.asks() if callable(self.asks) else self.asks)

    def __str__(self) -> str:
        return self.name


def refused(words: str = "", /, **fields: Any) -> Ask:
    return Ask(fields, words=words)


def served(**fields: Any) -> Ask:
    return Ask(fields, (200,))


def either(**fields: Any) -> Ask:
    """Both are right: what it takes is known late, or depends on the machine."""
    return Ask(fields, (200, 400))


def beyond(**fields: Any) -> Ask:
    """Numbers of more than 64 bits, which a Python caller may have."""
    return Ask(fields, words="64 bits|out of range", is_online_only=True)


def raw(text: str, words: str = "", statuses: tuple[int, ...] = (400,)) -> Ask:
    return Ask(raw=text, words=words, statuses=statuses, is_online_only=True)


VOCAB = 8192
PAST = [VOCAB, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1]
BEFORE = [-1, -(2**31) - 1, -(2**63)]
OVER_64_BITS = [2**63, 2**64, 2**64 + 5, 10**40]
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e39", "-1e39"]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


def floats() -> Iterator[Ask]:
    for name in FLOATS:
        for number in NO_NUMBERS:
            yield raw(f'{{"prompt": "Hi", "max_tokens": 2, "{name}": {number}}}')
            if "1e4" not in number:  # Python reads it as infinity
                yield Ask({name: float(number)}, words=name, path="offline only")
    for number in NO_NUMBERS:
        yield raw(f'{{"prompt": "Hi", "max_tokens": 2, "logit_bias": {{"5": {number}}}}}')
        yield raw(f'{{"prompt": "Hi", "use_beam_search": true, "n": 2, "length_penalty": {number}}}')
    for name, number in [("temperature", 1e-320), ("temperature", 1.1e-5), ("top_p", 1e-320), ("min_p", 5e-324)]:
        yield served(**{name: number})
    yield served(temperature=1e6, top_p=1e-45, min_p=1.0, repetition_penalty=100.0, frequency_penalty=2.0)


def salts() -> Iterator[Ask]:
    for salt in ("x" * 1024, NUL, BIDI, "\r\nx: y", "../../etc", "{{ 7 * 7 }}", "é" * 1024, "\U0001f600" * 1024, " "):
        yield served(cache_salt=salt)
    yield served(cache_salt="")
    for wrong in ("x" * 1025, 5, True, ["a"], {"a": "b"}, 1.5):
        yield refused("cache_salt", cache_salt=wrong)
    yield raw('{"prompt": "a", "cache_salt": "\\ud800"}')


def predictions() -> Iterator[Ask]:
    for text in ("", NUL, BIDI, "<|im_end|>" * 50, "\U0001f600" * 100, "Hi" * 300):
        yield served(prediction=text)
        yield served(prediction=text, n=3)
    for wrong in (5, True, 1.5, ["x"], [True], {"a": "b"}, "x" * 2**22 + "x", "a b " * 20_000):
        yield refused("prediction", prediction=wrong)
    for wrong in (
        {"content": "x"},
        {"type": "content"},
        {"type": "x", "content": "x"},
        [5],
        {"type": "content", "content": [5]},
    ):
        yield Ask({"prediction": wrong}, words="prediction", is_online_only=True)
    many = [{"type": "text", "text": "x"}] * 20_000
    yield Ask({"prediction": {"type": "content", "content": many}}, (200, 400, 413), is_online_only=True)
    yield Ask({"prediction": "Hi", "use_beam_search": True, "n": 2}, words="prediction", is_online_only=True)
    yield raw('{"prompt": "a", "prediction": "\\ud800"}')
    for ids in ([-1], [VOCAB], [2**70], [0] * 2**22 + [0]):
        yield Ask({"prediction": ids}, words="prediction", path="offline only")
    yield Ask({"prediction": SURROGATE}, (200, 400), path="offline only")


def texts(name: str, max_num: int, max_len: int) -> list[Ask]:
    """Of a list of strings."""
    return [
        refused(name, **{name: [f"string {i}" for i in range(10_000)]}),
        refused(name, **{name: ["x"] * (max_num + 1)}),
        refused(name, **{name: ["x" * (max_len + 1)]}),
        refused(name, **{name: [""]}),
        refused(name, **{name: [5]}),
        served(**{name: ["x" * max_len]}),
        served(**{name: [NUL, BIDI, "\U0001f600", "\ufffd"]}),
        served(**{name: ["a" * i for i in range(1, 180)]}),
    ]


PARAMS = [
    Case("huge n", [
        refused("1,?000,?000,?000", n=10**9), refused("max_num_seqs=32", n=33), refused("n=0", n=0),
        refused("", n=-(2**63)), refused("", n=2**63 - 1), beyond(n=2**64), served(n=32),
        Ask({"prompt": ["a"] * 1024, "n": 2}, words="choices", is_online_only=True),
    ]),
    Case("huge best_of", [
        refused("1,?000,?000,?000", best_of=10**9), refused("max_num_seqs", best_of=33, n=1),
        refused("best_of", best_of=2, n=3), refused("greedy", best_of=2, n=1, temperature=0), beyond(best_of=2**63),
        served(best_of=32, n=2),
    ]),
    Case("huge beams", [
        refused("", use_beam_search=True, n=2**40), refused("max_num_seqs|256", use_beam_search=True, n=33),
        served(use_beam_search=True, n=32), served(use_beam_search=True, n=4, max_tokens=2**50),
    ]),
    Case("huge logprobs", [
        refused("max_logprobs=20", logprobs=21), refused("max_logprobs", logprobs=-1), refused("", logprobs=2**62),
        refused("max_logprobs", prompt_logprobs=10**9), refused("logprobs", prompt_logprobs=-2),
        beyond(logprobs=10**30), served(logprobs=20, prompt_logprobs=20, prompt=[5] * 2000, n=8),
    ]),
    Case("huge max_tokens", [
        served(max_tokens=2**63 - 1, prompt=[5] * 1980),
        served(max_tokens=10**9, n=16, ignore_eos=True, prompt=[5] * 1980),
        refused("max_tokens", max_tokens=-1), refused("max_tokens", max_tokens=-(2**63)), beyond(max_tokens=2**63),
    ]),
    Case("huge min_tokens", [
        served(max_tokens=2**62, min_tokens=2**62, prompt=[5] * 2000), refused("min_tokens", min_tokens=10**9),
        refused("min_tokens", min_tokens=-1), beyond(min_tokens=2**64),
    ]),
    Case("huge top_k and seeds", [
        served(top_k=2**62), refused("top_k", top_k=-2), beyond(top_k=2**64), served(seed=2**63 - 1), served(seed=-2),
        refused("seed", seed=-(2**63)), beyond(seed=2**63), refused("priority", priority=2**40),
    ]),
    Case("truncate_prompt_tokens", [
        refused("truncate", truncate_prompt_tokens=0), refused("truncate", truncate_prompt_tokens=2**40),
        served(truncate_prompt_tokens=-1, prompt="word " * 200_000),
        served(truncate_prompt_tokens=7, prompt="a" * 30_000_000),
    ]),
    Case("ids in logit_bias at and past every width", [
        served(logit_bias={"8191": 100, "0": -100}),
        *[refused("logit_bias", logit_bias={str(i): 1}) for i in PAST + BEFORE + OVER_64_BITS],
        *[refused("logit_bias", logit_bias={key: 1}) for key in ("", "a", "1.5", "٣", "0x5", " 5", NUL, "9" * 5000)],
        refused("logit_bias", logit_bias={str(i): 1 for i in range(1025)}),
        served(logit_bias={str(i): -100 for i in range(1024)}),
    ]),
    Case("ids in allowed_token_ids at and past every width", [
        served(allowed_token_ids=[VOCAB - 1]), served(allowed_token_ids=[5] * VOCAB),
        either(allowed_token_ids=[5] * 250_000),
        *[refused("allowed_token_ids", allowed_token_ids=[5, i]) for i in PAST + BEFORE],
        *[beyond(allowed_token_ids=[i]) for i in OVER_64_BITS],
        refused("allowed_token_ids", allowed_token_ids=list(range(262_145))),
        refused("allowed_token_ids", allowed_token_ids=[]), refused("allowed_token_ids", allowed_token_ids=[1.5]),
        Ask({"allowed_token_ids": [5] * 200_000, "prompt": ["a"] * 500}, words="8,192|fewer", is_online_only=True),
    ]),
    Case("ids in stop_token_ids at and past every width", [
        served(stop_token_ids=[VOCAB - 1] * 1024), refused("stop_token_ids", stop_token_ids=[5] * 1025),
        *[refused("stop_token_ids", stop_token_ids=[i]) for i in PAST + BEFORE],
        *[beyond(stop_token_ids=[i]) for i in OVER_64_BITS],
    ]),
    Case("ids in the prompt at and past every width", [
        served(prompt=[VOCAB - 1]), *[refused("token id", prompt=[5, i]) for i in PAST + BEFORE],
        *[beyond(prompt=[i]) for i in OVER_64_BITS], refused("context", prompt=[5] * 2048),
        Ask({"prompt": [5] * 900_000}, words="context", is_online_only=True),
    ]),
    Case("words in bad_words", [
        *texts("bad_words", 1024, 16_384), served(bad_words=["<|im_end|>", "<|endoftext|>"]),
        Ask({"prompt": ["Hi"] * 32, "bad_words": [f"word{i}" for i in range(1024)], "max_tokens": 1}, (200,),
            is_online_only=True),
    ], limit_s=4),
    Case("10,000 stop strings", texts("stop", 1024, 16_384)),
    Case("NaN, infinities, 1e400", floats),
    Case("cache salts of every odd kind", salts),
    Case("predictions of every odd kind", predictions),
    Case("many prompts", [
        Ask({"prompt": ["a"] * 1025}, (400, 429), "1,024 are allowed|wait", is_online_only=True),
        Ask({"prompt": ["Hi"] * 256, "max_tokens": 1}, (200, 429), is_online_only=True),
        Ask({"prompt": ["Hi"] * 255 + [[10**6]], "max_tokens": 1}, (400, 429), "token id|wait", is_online_only=True),
        Ask({"prompt": ["a"] * 1024, "guided_json": {"enum": [f"value {i}" for i in range(12_000)]}},
            (400, 429), "fewer prompts|wait", is_online_only=True),
    ], limit_s=4),
]  # fmt: skip


STRUCTURES = [
    Case(f"a hostile structure: {name}", [either(structured_outputs=fields, max_tokens=20)], limit_s=15, is_quick=False)
    for name, fields in HOSTILE.items()
]
"""which tests/grammar tries beside a neighbour"""

EXPLODING = {
    "nested counts": "((a{1,1000}){1,1000}){1,1000}",
    "counts of counts": "((((a{100}){100}){100}){100}){100}",
    "states that double": "(.*a.{14}){4}",
    "nested quantifiers": "(a+)+b" * 50,
    "word counts": r"(\w{1,500} ?){1,500}",
    "what may be missing": "(a?){30000}a{30000}",
    "a billion letters": "a{1000000000}",
    "30,000 parentheses": "(" * 30_000 + "a" + ")" * 30_000,
    "alternatives": "|".join(f"{i}.*" for i in range(8_000)),
    "classes of Unicode": r"(\p{L}\p{N}?){1,300}[^\x00-\u{10ffff}]?",
    "bounds beyond numbers": "a{99999999999999999999}",
    "look-behind": "(?<=a)b",
    "reference back": r"(a)\1",
    "not UTF-8": r"\xff\xfe",
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def any_of(depth: int) -> dict[str, Any]:
    """Twice as large with each level, by references."""
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, depth):
        defs[f"d{i}"] = {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"items": {"$ref": f"#/$defs/d{i - 1}"}}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{depth - 1}"}


GRAMMARS = [
    Case("invalid schemas", [
        refused("json", guided_json="{"), refused("json", guided_json="[]"), refused("", guided_json={"type": "none"}),
        refused("", guided_json={"properties": 5}), refused("", guided_json={"$ref": "#/$defs/none"}),
        refused("", guided_json={"$ref": "file:///etc/passwd"}), refused("", guided_json={"$ref": "http://127.0.0.1/"}),
        refused("", guided_json={"pattern": "("}), refused("", guided_json={"enum": []}),
        refused("", guided_json={"type": "integer", "minimum": 5, "maximum": 3}),
        refused("", guided_json={"required": "a"}),
        either(guided_json={NUL: NUL, BIDI: {}}), refused("", structured_outputs={"json": "{}", "regex": "a"}),
        refused("each constrain the output", guided_json={}, guided_regex="a"),
    ]),
    Case("invalid grammars", [
        refused("", guided_grammar="root ::= nothing"), either(guided_grammar="start: "),
        refused("", guided_grammar="\0"), refused("", guided_grammar="start: <[999999]>"),
        refused("", guided_grammar='start: "a" start'), refused("", guided_grammar='root ::= "a" root'),
        refused("", guided_grammar="%import x"), refused("", guided_grammar='%include "/etc/passwd"'),
        refused("", guided_grammar='start: %json {"$ref": "file:///etc/passwd"}'), refused("choice", guided_choice=[]),
        refused("choice", guided_choice=["x"] * 10_001), either(guided_choice=[NUL, BIDI, "\U0001f600"]),
    ]),
    Case("recursive schemas and grammars", [
        either(guided_json={"$ref": "#"}), either(guided_json={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        either(guided_json={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        either(guided_json=any_of(64)), either(guided_grammar='root ::= root root | root root root | "a" | ""'),
        either(guided_grammar='root ::= root "a" | "a"'),
    ], limit_s=12),
    Case("enormous schemas and grammars", [
        refused("at most 262,144", guided_json={"enum": [f"value {i}" for i in range(30_000)]}),
        refused("at most 65,536", guided_regex="a" * 70_000), refused("at most", guided_grammar="#" * 70_000),
        refused("at most 16,384", guided_grammar="root ::= " + '"a" ' * 5_000),
        either(guided_json={"properties": {f"p{i}": {"type": "string"} for i in range(5_000)}}),
        either(guided_choice=[f"city {i * 7919}" for i in range(10_000)]),
        either(guided_json={"type": "array", "minItems": 10**6}),
        either(guided_json={"type": "string", "maxLength": 10**9}),
    ], limit_s=12),
    Case("deeply nested schemas and grammars", [
        either(guided_json=nested(60)), either(guided_json=nested(200)), either(guided_json=nested(450)),
        refused("", guided_json='{"items":' * 30_000 + "{}" + "}" * 30_000),
        refused("", guided_grammar="root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000),
        refused("", guided_grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        raw('{"prompt": "a", "guided_json": ' + '{"a":' * 100_000 + "1" + "}" * 100_001),
    ], limit_s=12),
    *[Case(f"a regular expression that explodes: {name}", [either(guided_regex=regex, max_tokens=20)], limit_s=12,
           is_quick=name in ("nested counts", "30,000 parentheses", "nested quantifiers"))
      for name, regex in EXPLODING.items()],
]  # fmt: skip
