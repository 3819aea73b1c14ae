"""What the `quantization_config` of compressed-tensors says of each module, and which ones are refused."""

import re

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.name_patterns import NamePatterns
from quire.config.quantization.compressed import CompressedQuantization, CompressedScheme, read_block
from quire.config.quantization.module_names import ModuleNames

from .quantized import LONG, SHOWN, compressed, refused, section

INT8, FP8, MXFP4 = "int-quantized", "float-quantized", "mxfp4-pack-quantized"
FLOAT = {"type": "float", "num_bits": 8}
DYNAMIC = {"dynamic": True}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (compressed({}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({"num_bits": 4, "group_size": 32}), CompressedScheme("pack-quantized", 4, (1, 32))),
        (compressed({"num_bits": 4, "group_size": 2**20}), CompressedScheme("pack-quantized", 4, (1, 2**20))),
        (compressed({"group_size": -1}), CompressedScheme("pack-quantized", 8, (1, 0))),
        (compressed({"strategy": "CHANNEL", "group_size": 32}), CompressedScheme("pack-quantized", 8, (1, 0))),
        (compressed({"strategy": "tensor", "group_size": 32}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({"symmetric": False}), CompressedScheme("pack-quantized", 8, (0, 0), is_symmetric=False)),
        (compressed({"actorder": "group"}), CompressedScheme("pack-quantized", 8, (0, 0), is_reordered=True)),
        (compressed({"actorder": "dynamic"}), CompressedScheme("pack-quantized", 8, (0, 0), is_reordered=True)),
        (compressed({"actorder": True}), CompressedScheme("pack-quantized", 8, (0, 0), is_reordered=True)),
        (compressed({"actorder": "weight"}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({"actorder": "static"}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({"actorder": False}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({"type": "INT"}, format=INT8), CompressedScheme(INT8, 8, (0, 0))),
        (compressed({}, format="naive-quantized"), CompressedScheme(INT8, 8, (0, 0))),
        (compressed(FLOAT, format="naive-quantized"), CompressedScheme(FP8, 8, (0, 0))),
        (compressed(FLOAT | {"group_size": 7}, format=FP8), CompressedScheme(FP8, 8, (1, 7))),
        (compressed(FLOAT | {"group_size": 2**20}, format=FP8), CompressedScheme(FP8, 8, (1, 2**20))),
        (
            compressed(FLOAT | {"strategy": "block", "block_structure": [128, 64]}, format=FP8),
            CompressedScheme(FP8, 8, (128, 64)),
        ),
        (compressed(FLOAT, format=FP8, input_activations={"dynamic": False}), CompressedScheme(FP8, 8, (0, 0))),
        (compressed({}, input_activations=DYNAMIC), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed(FLOAT | {"num_bits": 4, "group_size": 32}, format=MXFP4), CompressedScheme(MXFP4, 4, (1, 32))),
        (compressed({}, quantization_status="frozen"), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({}, quantization_status="compressed"), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({}, sparsity_config={}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({}, sparsity_config={"a": 1}), CompressedScheme("pack-quantized", 8, (0, 0))),
        (compressed({}, sparsity_config={"format": "dense"}), CompressedScheme("pack-quantized", 8, (0, 0))),
    ],
    ids=range(27),
)
def test_how_the_modules_of_a_group_are_stored(stated, expected):
    read = CompressedQuantization.read(section(stated))
    assert read.scheme_of("any.module") == expected


def of_weights(message):
    return f"config_groups: group_0: weights: {message}"


@pytest.mark.parametrize(
    ("stated", "error", "message"),
    [
        (compressed({}, kv_cache_scheme={"a": 1}), UnsupportedModelError, "kv_cache_scheme is not supported; take"),
        (compressed({}, moe_sparsity_config={"a": 1}), UnsupportedModelError, "moe_sparsity_config is not supported"),
        (compressed({}, transform_config={"a": 1}), UnsupportedModelError, "transform_config is not supported"),
        (
            compressed({}, sparsity_config={"format": LONG}),
            UnsupportedModelError,
            f"sparsity_config: the format is '{SHOWN}'; Quire reads dense weights$",
        ),
        (
            compressed({}, quantization_status=LONG),
            UnsupportedModelError,
            f"quantization_status is '{SHOWN}'; Quire reads 'compressed'",
        ),
        (compressed({}, config_groups={}), CheckpointError, "config_groups must have 1 to 256 groups$"),
        (compressed({}, config_groups=None), CheckpointError, "config_groups must have 1 to 256 groups$"),
        (compressed({}, config_groups={LONG: None}), CheckpointError, f"config_groups: '{SHOWN}' must be an object$"),
        (compressed(None), UnsupportedModelError, "config_groups: group_0: without weights; Quire quantizes no"),
        (
            compressed({}, format=LONG),
            UnsupportedModelError,
            f"config_groups: group_0: the format is '{SHOWN}'; Quire reads pack-quantized, int-quantized, "
            "float-quantized, mxfp4-pack-quantized and naive-quantized$",
        ),
        (
            compressed({"type": "float"}),
            UnsupportedModelError,
            of_weights(
                "float weights of 8 bits with a scale for each tensor; in pack-quantized Quire reads int of 4 or 8 "
                "bits, for each tensor, channel, group$"
            ),
        ),
        (
            compressed({"type": LONG}),
            UnsupportedModelError,
            of_weights(f"{SHOWN} weights of 8 bits".replace("(?!x)", "")),
        ),
        (compressed({"num_bits": 3}), UnsupportedModelError, of_weights("int weights of 3 bits")),
        (compressed({"strategy": LONG}), UnsupportedModelError, of_weights(f"int .* for each {SHOWN}; in")),
        (compressed({"strategy": "block"}), UnsupportedModelError, of_weights("int .* for each block; in")),
        (compressed(DYNAMIC), UnsupportedModelError, of_weights("dynamic weights, or floats with zero points$")),
        (
            compressed(FLOAT | {"symmetric": False}, format=FP8),
            UnsupportedModelError,
            of_weights("dynamic weights, or"),
        ),
        (compressed({"actorder": LONG}), UnsupportedModelError, of_weights(f"actorder is '{SHOWN}'$")),
        (
            compressed({"group_size": 48}),
            UnsupportedModelError,
            of_weights("group_size is 48; in pack-quantized Quire reads multiples of 32 up to 1048576$"),
        ),
        (compressed({"group_size": 2**20 + 32}), UnsupportedModelError, of_weights("group_size is 1048608; in")),
        (
            compressed(FLOAT | {"group_size": 2**20 + 1}, format=FP8),
            UnsupportedModelError,
            of_weights("group_size is 1048577; in float-quantized Quire reads multiples of 1 up to 1048576$"),
        ),
        (
            compressed(FLOAT | {"num_bits": 4, "group_size": 64}, format=MXFP4),
            UnsupportedModelError,
            of_weights("group_size is 64; in mxfp4-pack-quantized Quire reads multiples of 32 up to 32$"),
        ),
        (compressed({"strategy": "group"}), CheckpointError, of_weights("").rstrip(": ") + " has no 'group_size'"),
        (
            compressed({"group_size": 0}),
            CheckpointError,
            of_weights("'group_size' is 0, but must be an integer from 1"),
        ),
        (
            compressed({}, output_activations=DYNAMIC),
            UnsupportedModelError,
            "config_groups: group_0: output_activations",
        ),
        (
            compressed({}, input_activations={"dynamic": "local"}),
            UnsupportedModelError,
            "config_groups: group_0: input_activations: static scales of inputs are not supported; take",
        ),
        (compressed({}, ignore="lm_head"), CheckpointError, "'ignore' must be a list of names and patterns$"),
        (compressed({}, ignore=["re:("]), CheckpointError, r"'ignore' has the pattern '\('"),
    ],
    ids=range(28),
)
def test_groups_that_are_refused(stated, error, message):
    with refused(error, f"config.json:? ?{message}"):
        CompressedQuantization.read(section(stated))


def test_the_format_of_a_group_goes_before_that_of_all():
    own = {"targets": ["a"], "format": FP8, "weights": FLOAT}
    groups = {"group_0": own, "group_1": {"targets": ["Linear"], "weights": {}}}
    read = CompressedQuantization.read(section(compressed({}, config_groups=groups, format=INT8)))
    assert [read.scheme_of(name).format for name in ("a", "b")] == [FP8, INT8]


def test_of_two_groups_that_name_a_module_alike_the_first_decides():
    groups = {str(bits): {"targets": ["re:.*q"], "weights": {"num_bits": bits}} for bits in (8, 4)}
    read = CompressedQuantization.read(section(compressed({}, config_groups=groups)))
    assert read.scheme_of("m.q").bits == 8
    assert read.scheme_of("m.k") is None, "no group names it"


def test_modules_that_are_ignored_have_no_scheme():
    read = CompressedQuantization.read(section(compressed({}, ignore=["lm_head", "re:.*gate"])))
    assert [read.scheme_of(name) is None for name in ("lm_head", "m.gate", "m.q")] == [True, True, False]


def test_the_number_of_groups_and_that_of_all_patterns_are_limited():
    def groups(number, **more):
        return compressed({}, config_groups={str(i): {"weights": {}, **more} for i in range(number)})

    assert len(CompressedQuantization.read(section(groups(256))).groups) == 256
    with refused(CheckpointError, "config.json: config_groups must have 1 to 256 groups$"):
        CompressedQuantization.read(section(groups(257)))
    with refused(UnsupportedModelError, "config.json: config_groups: 1: 'targets': more than 4,096 patterns$"):
        CompressedQuantization.read(section(groups(2, targets=["re:a"] * 3000)))
    with refused(UnsupportedModelError, "config.json: 'ignore': more than 4,096 patterns$"):
        CompressedQuantization.read(section(groups(1, targets=["re:a"] * 4096) | {"ignore": ["re:a"]}))


@pytest.mark.parametrize("block", [[1, 1], [2**20, 3], [3, 2**20]])
def test_a_block_has_rows_and_columns(block):
    assert read_block(section({"b": block}), "b") == tuple(block)


@pytest.mark.parametrize(
    "block", [None, 1, [], [1], [1, 1, 1], [0, 1], [1, 0], [-1, 1], [1, 1.5], [2**20 + 1, 1], [1, 2**20 + 1]]
)
def test_a_block_that_is_malformed(block):
    with refused(CheckpointError, f"config.json: 'b' is {re.escape(str(block))}, but must be two positive integers$"):
        read_block(section({"b": block}), "b")


def test_a_long_block_is_cut_in_the_message():
    with refused(CheckpointError, f"config.json: 'b' is {SHOWN}, but must"):
        read_block(section({"b": LONG}), "b")


def test_modules_are_named_by_name_pattern_or_class():
    names = ModuleNames.read("config.json", {"key": ["a.b", "re:.*q_proj$", "re:c"]}, "key", NamePatterns())
    assert [names.match(module) for module in ("a.b", "m.q_proj", "c.d", "m.q_proj.x", "b")] == [0, 1, 1, None, None]
    names = ModuleNames.read("config.json", {"key": ["Linear", "a", "re:b"]}, "key", NamePatterns())
    assert [names.match(module) for module in ("a", "b", "x")] == [0, 1, 2]
    assert ModuleNames.read("config.json", {}, "key", NamePatterns()).match("a") is None
    assert ModuleNames.read("config.json", {"key": None}, "key", NamePatterns()).match("a") is None


@pytest.mark.parametrize("value", ["a", {"a": 1}, [1], ["a", None]])
def test_names_of_modules_must_be_a_list_of_texts(value):
    with refused(CheckpointError, "config.json: 'key' must be a list of names and patterns$"):
        ModuleNames.read("config.json", {"key": value}, "key", NamePatterns())
