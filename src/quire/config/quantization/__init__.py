"""The quantization of weights: the argument `quantization`, and the statement of config.json."""

from collections.abc import Callable

from quire.common.errors import ConfigError, UnsupportedModelError, check_choice, nearest_name
from quire.config.checkpoint.gguf.hf_values import QUANT_METHOD as GGUF_METHOD
from quire.config.hf_config import HFConfig
from quire.config.quantization.compressed import CompressedQuantization
from quire.config.quantization.float8 import float8_block
from quire.config.quantization.integers import IntegerQuantization

QUANTIZATIONS = ("int8", "int4")
"""What weights can be quantized to while they are loaded."""
WEIGHTS_FROM_FILE = ("auto", "always", "never")
"""Whether experts that a file has in the kernels' layout stay there: `auto`, if there is not the memory for them."""
_NAMED_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""Methods that may be named as the quantization, as for vLLM; the checkpoint must be quantized with that one."""
QUANT_METHOD = "quire"
QUANTIZED_VERSION = 3
"""The version of the layout that `quire quantize` saves: csrc/quantized/layout.h, under the model's names."""


def check_quantization(quantization: str | None, of_head: str | None = None, from_file: str = "auto") -> None:
    """Raise ConfigError for a `quantization` that weights cannot be quantized to while they are loaded and that is no
    method that a checkpoint may be quantized with, for another `head_quantization` than int8, and for a
    `weights_from_file` that is not one of WEIGHTS_FROM_FILE."""
    if of_head is not None:
        check_choice("head_quantization", of_head, ("int8",))
    check_choice("weights_from_file", from_file, WEIGHTS_FROM_FILE)
    if quantization is not None and quantization not in (*QUANTIZATIONS, *_NAMED_METHODS):
        raise ConfigError(
            f"quantization={quantization!r}{nearest_name(quantization, (*QUANTIZATIONS, *_NAMED_METHODS))} "
            f"(allowed: {', '.join(QUANTIZATIONS)}, or for a checkpoint that is quantized so: "
            f"{', '.join(_NAMED_METHODS)}; leave it out to keep the weights as they are)"
        )


def read_quantization(
    hf: HFConfig, asked: str | None, name: str, from_file: str = "auto"
) -> tuple[str | None, str | None]:
    """Return the `quant_method` of a checkpoint's weights (None for plain ones), and the quantization they will have.

    `asked` is what was asked for: with one of QUANTIZATIONS, other tools' weights are quantized again. Raises
    UnsupportedModelError if no row of METHODS reads the weights, and ConfigError, which names the model `name`, if they
    are quantized in another way already, or if `from_file` (`weights_from_file`) is `always` and the files do not have
    the matrices as the kernels read them.
    """
    method, saved = _stated(hf)
    others = QUANTIZATIONS if method != QUANT_METHOD else ()
    if saved is not None and asked not in (None, saved, *others):
        raise ConfigError(f"quantization={asked!r}: the weights of {name} are {saved} already")
    if saved is None and asked not in (None, *QUANTIZATIONS):
        raise ConfigError(
            f"quantization={asked!r}: the weights of {name} are not quantized by {asked}; "
            f"{' or '.join(QUANTIZATIONS)} quantizes them while they are loaded"
        )
    if from_file == "always" and method != QUANT_METHOD:
        raise ConfigError(
            f"weights_from_file='always': the files of {name} do not have the matrices as the kernels read them; "
            f"save them so with `quire quantize {name} FOLDER --quantization int4`, and give FOLDER as the model"
        )
    return method, asked or saved


def _stated(hf: HFConfig) -> tuple[str | None, str | None]:
    """The method that a config names, and the quantization that its weights have; None twice for plain weights."""
    section = hf.section("quantization_config")
    if not section:
        return None, None
    method = section.text("quant_method", "")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{section.source}: the weights are quantized with the method {method[:80]!r}; Quire reads float32, "
            f"bfloat16 and float16 weights, and the methods {', '.join(METHODS)}: take the unquantized checkpoint"
        )
    return method, METHODS[method](section)


def _saved_by_quire(section: HFConfig) -> str:
    version, format = section.get("version"), section.text("format")
    if version != QUANTIZED_VERSION or format not in QUANTIZATIONS:
        raise UnsupportedModelError(
            f"{section.source}: quantized to {format!r} in version {version!r} of the layout, readable are "
            f"{', '.join(QUANTIZATIONS)} in version {QUANTIZED_VERSION}: run `quire quantize` again"
        )
    return format


def _checked_by(check: Callable[[HFConfig], object]) -> Callable[[HFConfig], str]:
    """Names the quantization as the method, after a check of the section, before any weights are downloaded."""

    def read(section: HFConfig) -> str:
        check(section)
        return section.text("quant_method")

    return read


METHODS: dict[str, Callable[[HFConfig], str | None]] = {
    QUANT_METHOD: _saved_by_quire,
    GGUF_METHOD: lambda _: None,
    **dict.fromkeys(("gptq", "awq"), _checked_by(IntegerQuantization.read)),
    "compressed-tensors": _checked_by(CompressedQuantization.read),
    "fp8": _checked_by(float8_block),
    "mxfp4": lambda section: section.text("quant_method"),
}
"""quant_method -> reads the rest of `quantization_config` and names the quantization, None where each tensor has its
own. How the weights are then loaded is the pass of the same name in quire.models.weights.quantization."""
