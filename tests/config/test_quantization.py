"""What the `quantization_config` of a checkpoint says of its weights, and which ones are refused."""

from functools import partial

import pytest

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.quantization import QUANTIZATIONS, QUANTIZED_VERSION, check_quantization, read_quantization
from quire.config.quantization.float8 import float8_block
from quire.config.quantization.integers import IntegerQuantization, IntegerScheme

from .quantized import LONG, SHOWN, compressed, refused, section

# GPTQ and AWQ

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
GPTQ_SCHEME = partial(IntegerScheme, bits=4, group_size=64, is_awq=False, zero_offset=1)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (GPTQ, GPTQ_SCHEME()),
        (GPTQ | {"checkpoint_format": "gptq"}, GPTQ_SCHEME()),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, GPTQ_SCHEME(zero_offset=0)),
        (GPTQ | {"sym": True}, GPTQ_SCHEME(is_symmetric=True)),
        (GPTQ | {"desc_act": True}, GPTQ_SCHEME(is_reordered=True)),
        (GPTQ | {"desc_act": True, "group_size": 32}, GPTQ_SCHEME(group_size=32, is_reordered=True)),
        (GPTQ | {"desc_act": True, "group_size": -1}, GPTQ_SCHEME(group_size=0)),
        (GPTQ | {"group_size": 2**20 - 32}, GPTQ_SCHEME(group_size=2**20 - 32)),
        (GPTQ | {"pack_dtype": "int32"}, GPTQ_SCHEME()),
        ({"quant_method": "gptq", "bits": 8}, GPTQ_SCHEME(bits=8, group_size=0)),
        ({"quant_method": "gptq", "w_bit": 8, "q_group_size": 32}, GPTQ_SCHEME(bits=8, group_size=32)),
        (GPTQ | {"w_bit": 8, "q_group_size": 32}, GPTQ_SCHEME()),
        (AWQ, IntegerScheme(4, 64, True)),
        (AWQ | {"version": "GEMM", "checkpoint_format": "x"}, IntegerScheme(4, 64, True)),
        (AWQ | {"version": "exllama", "group_size": -1}, IntegerScheme(4, 0, True)),
        (AWQ | {"version": "ipex", "sym": True, "desc_act": True}, IntegerScheme(4, 64, True)),
    ],
)
def test_how_integers_are_stored(stated, expected):
    read = IntegerQuantization.read(section(stated))
    assert read == IntegerQuantization(expected)
    assert read.scheme_of("anything") == expected


def test_bits_have_no_default():
    with refused(UnsupportedModelError, "config.json: weights of None bits; of this method Quire reads 4 and 8$"):
        IntegerQuantization.read(section({"quant_method": "gptq"}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"checkpoint_format": LONG}, UnsupportedModelError, f"GPTQ's checkpoint_format is '{SHOWN}', readable are"),
        ({"quant_method": "awq", "version": LONG}, UnsupportedModelError, f"AWQ's version is '{SHOWN}', readable is"),
        ({"bits": 3}, UnsupportedModelError, "weights of 3 bits; of this method Quire reads 4 and 8$"),
        ({"bits": "4"}, UnsupportedModelError, "weights of 4 bits; of this method Quire reads 4 and 8$"),
        ({"bits": None}, UnsupportedModelError, "weights of None bits"),
        ({"bits": LONG}, UnsupportedModelError, f"weights of {SHOWN} bits"),
        ({"bits": 8, "quant_method": "awq"}, UnsupportedModelError, "weights of 8 bits; of this method Quire reads 4$"),
        ({"group_size": 0}, UnsupportedModelError, "group_size is 0; Quire reads multiples of 32, and -1"),
        ({"group_size": 16}, UnsupportedModelError, "group_size is 16; Quire"),
        ({"group_size": 33}, UnsupportedModelError, "group_size is 33; Quire"),
        ({"group_size": -32}, UnsupportedModelError, "group_size is -32; Quire"),
        ({"group_size": 2**20}, UnsupportedModelError, "group_size is 1048576; Quire"),
        ({"group_size": "64"}, UnsupportedModelError, "group_size is 64; Quire"),
        ({"group_size": LONG}, UnsupportedModelError, f"group_size is {SHOWN}; Quire"),
        ({"pack_dtype": "int8"}, UnsupportedModelError, r"integers must be packed into int32 \(pack_dtype\)$"),
        ({"sym": 1}, CheckpointError, "sym must be true or false, not 1$"),
        ({"desc_act": LONG}, CheckpointError, f"desc_act must be true or false, not {SHOWN}$"),
        ({"dynamic": [1]}, CheckpointError, "dynamic must be an object of patterns$"),
        ({"dynamic": {LONG: 1}}, CheckpointError, rf"dynamic\['{SHOWN}'\] must be an object$"),
        ({"dynamic": {"a": {"bits": 3}}}, UnsupportedModelError, "weights of 3 bits"),
        ({"dynamic": {"-:(": {}}}, CheckpointError, r"dynamic has the pattern '\('"),
        ({"dynamic": {str(i): {} for i in range(4097)}}, UnsupportedModelError, "dynamic: more than 4,096"),
    ],
)
def test_integers_that_are_refused(change, error, message):
    with refused(error, f"config.json: {message}"):
        IntegerQuantization.read(section(GPTQ | change))


def test_the_first_rule_that_matches_a_module_decides_how_its_integers_are_stored():
    rules = {
        "-:.*embed": {},
        "+:.*down_proj": {"bits": 8},
        ".*layers.1": {"group_size": 32, "sym": True, "desc_act": False},
        ".*": {"bits": 4},
    }
    read = IntegerQuantization.read(
        section(GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2", "dynamic": rules})
    )
    base = IntegerScheme(4, 64, False, 0, False, True)
    assert read.scheme == base
    assert read.scheme_of("m.layers.1.down_proj") == IntegerScheme(8, 64, False, 0, False, True)
    assert read.scheme_of("m.layers.1.q_proj") == IntegerScheme(4, 32, False, 0, True, False)
    assert read.scheme_of("m.layers.0.q_proj") == base
    assert len(read.dynamic) == 3, "modules without integers have no scheme"


def test_a_rule_inherits_groups_of_whole_rows():
    read = IntegerQuantization.read(section({"quant_method": "gptq", "bits": 8, "dynamic": {"a": {"sym": True}}}))
    assert read.scheme_of("a") == IntegerScheme(8, 0, False, 1, is_symmetric=True)
    assert read.scheme_of("b") == read.scheme == IntegerScheme(8, 0, False, 1)


# FP8


@pytest.mark.parametrize(
    ("stated", "block"),
    [
        ({}, (0, 0)),
        ({"fmt": "e4m3", "kv_cache_scheme": None}, (0, 0)),
        ({"weight_block_size": None}, (0, 0)),
        ({"weight_block_size": [128, 64]}, (128, 64)),
    ],
)
def test_which_numbers_of_fp8_share_a_scale(stated, block):
    assert float8_block(section({"quant_method": "fp8"} | stated)) == block


@pytest.mark.parametrize(
    ("stated", "error", "message"),
    [
        ({"fmt": LONG}, UnsupportedModelError, f"not '{SHOWN}' with None$"),
        ({"fmt": "e5m2"}, UnsupportedModelError, "Quire reads numbers 'e4m3' without .*, not 'e5m2' with None$"),
        ({"kv_cache_scheme": LONG}, UnsupportedModelError, f"Quire reads .*, not 'e4m3' with {SHOWN}$"),
        ({"weight_block_size": [0, 1]}, CheckpointError, r"'weight_block_size' is \[0, 1\], but must be two positive"),
    ],
)  # fmt: skip
def test_fp8_that_is_refused(stated, error, message):
    with refused(error, f"config.json: .*{message}"):
        float8_block(section(stated))


# Any method

QUIRE = {"quant_method": "quire", "version": QUANTIZED_VERSION, "format": "int8"}


@pytest.mark.parametrize(
    ("stated", "asked", "expected"),
    [
        (None, None, (None, None)),
        ({}, "int4", (None, "int4")),
        (GPTQ, None, ("gptq", "gptq")),
        (GPTQ, "gptq", ("gptq", "gptq")),
        (GPTQ, "int8", ("gptq", "int8")),
        (AWQ, None, ("awq", "awq")),
        (compressed({}), None, ("compressed-tensors", "compressed-tensors")),
        ({"quant_method": "fp8"}, None, ("fp8", "fp8")),
        ({"quant_method": "mxfp4"}, "mxfp4", ("mxfp4", "mxfp4")),
        ({"quant_method": "gguf"}, None, ("gguf", None)),
        ({"quant_method": "gguf"}, "int4", ("gguf", "int4")),
        (QUIRE, None, ("quire", "int8")),
        (QUIRE | {"format": "int4"}, "int4", ("quire", "int4")),
    ],
    ids=range(13),
)
def test_the_method_of_a_checkpoint_and_the_quantization_that_it_will_have(stated, asked, expected):
    assert read_quantization(section({"quantization_config": stated}), asked, "model") == expected


@pytest.mark.parametrize(
    ("stated", "asked", "error", "message"),
    [
        (QUIRE, "int4", ConfigError, "quantization='int4': the weights of model are int8 already$"),
        (GPTQ, "awq", ConfigError, "quantization='awq': the weights of model are gptq already$"),
        (None, "awq", ConfigError, "quantization='awq': the weights of model are not quantized by awq; int8 or int4"),
        ({"quant_method": "gguf"}, "gptq", ConfigError, "quantization='gptq': the weights of model are not quantized"),
        (
            {"quant_method": LONG},
            None,
            UnsupportedModelError,
            f"config.json: quantization_config: the weights are quantized with the method '{SHOWN}'; .*"
            "methods quire, gguf, gptq, awq, compressed-tensors, fp8, mxfp4: take",
        ),
        ({"bits": 4}, None, UnsupportedModelError, "config.json: .* with the method ''; Quire reads"),
        (
            QUIRE | {"version": 2},
            None,
            UnsupportedModelError,
            "config.json: quantization_config: quantized to 'int8' in version 2 of the layout, readable are int8, int4 "
            f"in version {QUANTIZED_VERSION}: run",
        ),
        (QUIRE | {"format": "int2"}, None, UnsupportedModelError, "config.json: .*quantized to 'int2' in version 3 of"),
        ({"quant_method": "quire", "version": 3}, None, CheckpointError, "config.json: .* has no 'format'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, None, UnsupportedModelError, "config.json: .*'e5m2'"),
        (GPTQ | {"bits": 3}, None, UnsupportedModelError, "config.json: .*3 bits"),
        (AWQ | {"bits": 3}, None, UnsupportedModelError, "config.json: .*3 bits"),
        (compressed({"num_bits": 3}), None, UnsupportedModelError, "config.json: .*3 bits"),
    ],
    ids=range(13),
)
def test_a_quantization_that_is_refused(stated, asked, error, message):
    with refused(error, message):
        read_quantization(section({"quantization_config": stated}), asked, "model")


@pytest.mark.parametrize("name", [None, *QUANTIZATIONS, "gptq", "awq", "compressed-tensors", "fp8", "mxfp4"])
def test_quantizations_that_may_be_asked_for(name):
    check_quantization(name)


def test_a_quantization_that_does_not_exist():
    allowed = "int8, int4, or .* so: gptq, awq, .*, fp8, mxfp4; leave it out to keep the weights as they are.$"
    for wrong, near in (("gtpq", ", did you mean 'gptq'."), ("none", ""), ("", "")):
        with refused(ConfigError, f"quantization='{wrong}'{near} .allowed: {allowed}"):
            check_quantization(wrong)
