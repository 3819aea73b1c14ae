"""Integers with scales and zero points, as in checkpoints of GPTQ (Frantar et al. 2022) and AWQ (Lin et al. 2023)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.name_patterns import NamePattern, NamePatterns
from quire.config.hf_config import HFConfig


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """How one projection is stored: (integer - zero point) * scale, integers of 4 or 8 bits packed into int32."""

    bits: int
    """4 or 8."""
    group_size: int
    """How many inputs share a scale: a multiple of 32, or 0 for all of them."""
    is_awq: bool
    """AWQ packs along the outputs, in an order of its own; GPTQ along the inputs."""
    zero_offset: int = 0
    """What is added to a stored zero point: 1 in GPTQ's first version."""
    is_symmetric: bool = False
    """Whether all zero points are in the middle, 8 or 128."""
    is_reordered: bool = False
    """Whether the inputs of a group need not be neighbours (GPTQ's `desc_act`)."""


@dataclass(frozen=True, slots=True)
class IntegerQuantization:
    """The `quantization_config` of a GPTQ or AWQ checkpoint."""

    scheme: IntegerScheme
    dynamic: tuple[tuple[NamePattern, IntegerScheme], ...] = ()
    """GPTQModel's schemes by name, the first of which that matches decides. Modules without integers have none."""

    @classmethod
    def read(cls, section: HFConfig) -> "IntegerQuantization":
        """Raises UnsupportedModelError for a section that asks for what Quire does not compute, CheckpointError for a
        malformed one."""
        is_awq = section.text("quant_method") == "awq"
        if is_awq:
            version = section.text("version", "gemm").lower()
            if version not in ("gemm", "exllama", "ipex"):
                raise UnsupportedModelError(f"{section.source}: AWQ's version is {version[:80]!r}, readable is 'gemm'")
            offset = 0
        else:
            form = section.text("checkpoint_format", "gptq")
            if form not in ("gptq", "gptq_v2"):
                raise UnsupportedModelError(
                    f"{section.source}: GPTQ's checkpoint_format is {form[:80]!r}, readable are 'gptq' and 'gptq_v2'"
                )
            offset = 1 if form == "gptq" else 0
        scheme = _scheme(section, section, IntegerScheme(0, 0, is_awq, offset))
        return cls(scheme, tuple(_rules(section, scheme)))

    def scheme_of(self, module: str) -> IntegerScheme:
        """How the module of this name in the checkpoint, which has integers, is stored."""
        return next((scheme for pattern, scheme in self.dynamic if pattern.starts(module)), self.scheme)


def _scheme(section: HFConfig, values: Mapping[str, Any], base: IntegerScheme) -> IntegerScheme:
    """The base with the values that are given."""
    bits = values.get("bits", values.get("w_bit", base.bits or None))
    group = values.get("group_size", values.get("q_group_size", base.group_size or -1))
    allowed = (4,) if base.is_awq else (4, 8)
    if type(bits) is not int or bits not in allowed:
        raise UnsupportedModelError(
            f"{section.source}: weights of {str(bits)[:80]} bits; of this method Quire reads "
            f"{' and '.join(map(str, allowed))}"
        )
    if type(group) is not int or not (group == -1 or (0 < group < 2**20 and group % 32 == 0)):
        raise UnsupportedModelError(
            f"{section.source}: group_size is {str(group)[:80]}; Quire reads multiples of 32, and -1 for whole rows"
        )
    if values.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(f"{section.source}: integers must be packed into int32 (pack_dtype)")
    symmetric, reordered = values.get("sym", base.is_symmetric), values.get("desc_act", base.is_reordered)
    for key, value in (("sym", symmetric), ("desc_act", reordered)):
        if type(value) is not bool:
            raise CheckpointError(f"{section.source}: {key} must be true or false, not {str(value)[:80]}")
    if base.is_awq:
        return replace(base, bits=bits, group_size=max(group, 0))
    return replace(
        base, bits=bits, group_size=max(group, 0), is_symmetric=symmetric, is_reordered=reordered and group > 0
    )


def _rules(section: HFConfig, base: IntegerScheme) -> list[tuple[NamePattern, IntegerScheme]]:
    found: list[tuple[NamePattern, IntegerScheme]] = []
    patterns = NamePatterns()
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{section.source}: dynamic must be an object of patterns")
    for text, values in dynamic.items():
        text = text.removeprefix("+:")
        pattern = patterns.compile(f"{section.source}: dynamic", text.removeprefix("-:"))
        if not isinstance(values, dict):
            raise CheckpointError(f"{section.source}: dynamic[{text[:80]!r}] must be an object")
        if not text.startswith("-:"):  # those have no integers
            found.append((pattern, _scheme(section, values, base)))
    return found
