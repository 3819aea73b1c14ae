"""How texts are cut into words, by the name that a GGUF header has for it (`tokenizer.ggml.pre`).

Patterns are those of the tokenizer.json files that the names stand for.
"""

from collections.abc import Mapping

from quire.text.tokenizer.formats.byte_level import CONTRACTION, GPT2, O200K, TEKKEN, WORDS, PreTokenizer, cased

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_OF_2023 = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_LETTERS_OF_2023 = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters with a case, as of an early version of Unicode."""
_MARKS_OF_2023 = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_WORDS = _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_SPACES = r"|\s+(?!\S)|\s+"
_NOT_SENTENCE_MARKS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGIT, _TO_3_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_RUNS_OF_SPACES = "|".join([*(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])
_YOUTU_RUNS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|" + _CJK
)

_LLAMA3 = PreTokenizer((WORDS % _TO_3_DIGITS,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((WORDS % _DIGIT,), composes=True)
_DEEPSEEK_V3 = PreTokenizer((_TO_3_DIGITS, _CJK, _DEEPSEEK_WORDS + r"[\r\n]*|\s*[\r\n]+" + _SPACES))
_BY_NAMES: Mapping[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"),
        "exaone4",
    ): PreTokenizer((GPT2,)),
    (*("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),): PreTokenizer(
        (_DIGIT, GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): _LLAMA3,
    ("smaug-bpe", "dbrx", "chatglm-bpe"): PreTokenizer((WORDS % _TO_3_DIGITS,)),
    ("glm4", "glm5"): PreTokenizer((WORDS % _TO_3_DIGITS,), whole_words=True),
    ("minicpm5",): PreTokenizer((_TO_3_DIGITS, WORDS % r"\p{N}+"), whole_words=True),
    ("jais-2",): PreTokenizer((WORDS.removesuffix(r"\s+(?!\S)|\s+") % _TO_3_DIGITS + _RUNS_OF_SPACES,)),
    ("qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"): _QWEN2,
    ("qwen35",): PreTokenizer(
        (CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES,),
        composes=True,
    ),
    ("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"): PreTokenizer((WORDS % _DIGIT,)),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", WORDS % _DIGIT)),
    ("ufakzeka",): PreTokenizer((WORDS.removeprefix(CONTRACTION + "|") % _DIGIT,)),
    ("seed-coder",): PreTokenizer(
        (CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+" + _SPACES,)
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" + _SPACES,)
    ),
    ("exaone-moe",): PreTokenizer(
        (
            CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|"
            r"\s*[\r\n]" + _SPACES,
        )
    ),
    ("tekken",): PreTokenizer((TEKKEN,), whole_words=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): PreTokenizer((O200K,)),
    ("tiny_aya", "cohere2moe"): PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", O200K)),
    ("youtu",): PreTokenizer((_YOUTU_RUNS, cased(f"{CONTRACTION}?", _DIGIT, "/")), whole_words=True),
    ("superbpe",): PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("deepseek-llm",): PreTokenizer(
        (
            *(r"[\r\n]", rf"\s?[{_LETTERS_OF_2023}]+", rf"\s?{_MARKS_OF_2023}", r"\s+$", _CJK_OF_2023),
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_2023, _DIGIT)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK_V3,
    ("spark2_5",): PreTokenizer((_TO_3_DIGITS, _CJK, _DEEPSEEK_WORDS + r"|[\r\n]" + _SPACES, _DIGIT)),
    ("bloom", "gpt3-finnish", "poro-chat"): PreTokenizer((_NOT_SENTENCE_MARKS,)),
    ("viking",): PreTokenizer((_NOT_SENTENCE_MARKS, _DIGIT)),
    ("chameleon",): PreTokenizer(
        (
            *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT),
            *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
        ),
        adds_bos=True,
    ),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _BY_NAMES.items() for name in names}
"""By `tokenizer.ggml.pre`. Encoders' are not among them, nor those that split no bytes (`gemma4`) or that no regular
expression describes (`afmoe`, `kimi-k2`)."""
