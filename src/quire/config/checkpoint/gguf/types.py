"""The types of tensors in GGUF files: numbers, names and sizes (ggml's `ggml.h` and `ggml-common.h`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """How one type stores its elements."""

    name: str
    """ggml's name in lower case."""
    dtype: str
    """The dtype in torch; uint8 for blocks, whose bits only a kernel understands."""
    elements: int
    """Elements in a block; 1 for plain numbers."""
    num_bytes: int
    """Bytes of a block."""

    @property
    def is_block(self) -> bool:
        """Whether several elements share a block."""
        return self.elements > 1


_PLAIN = {
    0: ("f32", "float32", 4), 1: ("f16", "float16", 2), 30: ("bf16", "bfloat16", 2), 28: ("f64", "float64", 8),
    24: ("i8", "int8", 1), 25: ("i16", "int16", 2), 26: ("i32", "int32", 4), 27: ("i64", "int64", 8),
}  # fmt: skip
_BLOCKS = {
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210), 20: ("iq4_nl", 32, 18), 23: ("iq4_xs", 256, 136), 39: ("mxfp4", 32, 17),
}  # fmt: skip

TENSOR_TYPES = {number: TensorType(name, dtype, 1, size) for number, (name, dtype, size) in _PLAIN.items()} | {
    number: TensorType(name, "uint8", elements, size) for number, (name, elements, size) in _BLOCKS.items()
}
"""By number in the file."""
UNSUPPORTED_TYPES = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s", 22: "iq2_s",
    29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4",
}  # fmt: skip
"""Types that exist and that Quire does not read."""
