"""The `quantization_config` of compressed-tensors: https://github.com/vllm-project/compressed-tensors"""

from dataclasses import dataclass

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.name_patterns import NamePatterns
from quire.config.hf_config import HFConfig
from quire.config.quantization.module_names import ModuleNames

_STRATEGIES = ("tensor", "channel", "group")
_FORMATS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "pack-quantized": ("int", (4, 8), _STRATEGIES),
    "int-quantized": ("int", (8,), _STRATEGIES),
    "float-quantized": ("float", (8,), (*_STRATEGIES, "block")),
    "mxfp4-pack-quantized": ("float", (4,), ("group",)),
}
"""format -> the type of its numbers, their bits, and what may share a scale."""
_STATUSES = ("compressed", "frozen")
"""`frozen` is what early versions wrote; the weights are compressed all the same."""
_MUST_BE_ABSENT = ("kv_cache_scheme", "moe_sparsity_config", "transform_config")
_MAX_GROUPS = 256
_MAX_GROUP_SIZE = 2**20
_GROUP_SIZES = {"float-quantized": (1, _MAX_GROUP_SIZE), "mxfp4-pack-quantized": (32, 32)}
"""format -> what group sizes are multiples of, and the largest, where other than for the kernels of integers."""


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """How the weights [n, k] of one group of modules are stored."""

    format: str
    """A key of _FORMATS."""
    bits: int
    block: tuple[int, int]
    """The rows and columns that share a scale; 0 for all of them."""
    is_symmetric: bool = True
    """Whether there are no zero points."""
    is_reordered: bool = False
    """Whether the inputs of a group need not be neighbours (`actorder` group)."""


@dataclass(frozen=True, slots=True)
class CompressedQuantization:
    """Which modules are stored in which way."""

    groups: tuple[tuple[ModuleNames, CompressedScheme], ...]
    ignored: ModuleNames

    @classmethod
    def read(cls, section: HFConfig) -> "CompressedQuantization":
        """Raises UnsupportedModelError for what Quire does not compute, CheckpointError for what is malformed."""
        _refuse_others(section)
        groups = section.section("config_groups")
        if not groups or len(groups) > _MAX_GROUPS:
            raise CheckpointError(f"{section.source}: config_groups must have 1 to {_MAX_GROUPS} groups")
        found, patterns = [], NamePatterns()
        for name in groups:
            group = groups.section(name)
            if group is None:
                raise CheckpointError(f"{groups.source}: {name[:80]!r} must be an object")
            targets = ModuleNames.read(group.source, group, "targets", patterns)
            found.append((targets, _scheme(group, group.text("format", section.text("format")))))
        return cls(tuple(found), ModuleNames.read(section.source, section, "ignore", patterns))

    def scheme_of(self, module: str) -> CompressedScheme | None:
        """The scheme for the module of this name in the checkpoint: a name goes before a pattern, and that before a
        class. None for one that is left out."""
        if self.ignored.match(module) is not None:
            return None
        matches = ((targets.match(module), scheme) for targets, scheme in self.groups)
        found = [(rank, scheme) for rank, scheme in matches if rank is not None]
        return min(found, key=lambda each: each[0])[1] if found else None


def _refuse_others(section: HFConfig) -> None:
    for key in _MUST_BE_ABSENT:
        if section.get(key):
            raise UnsupportedModelError(f"{section.source}: {key} is not supported; take a checkpoint without it")
    sparsity = section.section("sparsity_config")
    if sparsity and sparsity.text("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"{sparsity.source}: the format is {sparsity.text('format')[:80]!r}; Quire reads dense weights"
        )
    status = section.text("quantization_status", "compressed")
    if status not in _STATUSES:
        raise UnsupportedModelError(
            f"{section.source}: quantization_status is {status[:80]!r}; Quire reads 'compressed': save the model so"
        )


def _scheme(group: HFConfig, format: str) -> CompressedScheme:
    weights = group.section("weights")
    if weights is None:
        raise UnsupportedModelError(f"{group.source}: without weights; Quire quantizes no activations alone")
    kind = weights.text("type", "int").lower()
    format = f"{kind}-quantized" if format == "naive-quantized" else format
    if format not in _FORMATS:
        raise UnsupportedModelError(
            f"{group.source}: the format is {format[:80]!r}; Quire reads {', '.join(_FORMATS)} and naive-quantized"
        )
    of_type, bits, strategies = _FORMATS[format]
    strategy, num_bits = _strategy(weights), weights.size("num_bits", 8)
    if kind != of_type or num_bits not in bits or strategy not in strategies:
        raise UnsupportedModelError(
            f"{weights.source}: {kind[:80]} weights of {num_bits} bits with a scale for each {strategy[:80]}; in "
            f"{format} Quire reads {of_type} of {' or '.join(map(str, bits))} bits, for each {', '.join(strategies)}"
        )
    is_symmetric = weights.flag("symmetric", True)
    if weights.get("dynamic") or not (is_symmetric or kind == "int"):
        raise UnsupportedModelError(f"{weights.source}: dynamic weights, or floats with zero points")
    _check_activations(group, format)
    order = weights.get("actorder") or ""
    if order not in ("", True, "group", "dynamic", "weight", "static"):
        raise UnsupportedModelError(f"{weights.source}: actorder is {str(order)[:80]!r}")
    return CompressedScheme(
        format, num_bits, _block(weights, strategy, format), is_symmetric, order in (True, "group", "dynamic")
    )


def _strategy(weights: HFConfig) -> str:
    size = weights.get("group_size")
    return weights.text("strategy", "tensor" if size is None else "channel" if size == -1 else "group").lower()


def _block(weights: HFConfig, strategy: str, format: str) -> tuple[int, int]:
    if strategy == "block":
        return read_block(weights, "block_structure")
    if strategy != "group":
        return (0, 0) if strategy == "tensor" else (1, 0)
    size = weights.size("group_size")
    unit, largest = _GROUP_SIZES.get(format, (32, _MAX_GROUP_SIZE))
    if size % unit or size > largest:
        raise UnsupportedModelError(
            f"{weights.source}: group_size is {size}; in {format} Quire reads multiples of {unit} up to {largest}"
        )
    return (1, size)


def read_block(section: HFConfig, key: str) -> tuple[int, int]:
    """The rows and columns that share a scale. Raises CheckpointError for anything but two positive integers."""
    value = section.get(key)
    match value:
        case [int(rows), int(columns)] if 0 < rows <= _MAX_GROUP_SIZE and 0 < columns <= _MAX_GROUP_SIZE:
            return rows, columns
    raise CheckpointError(f"{section.source}: {key!r} is {str(value)[:80]}, but must be two positive integers")


def _check_activations(group: HFConfig, format: str) -> None:
    """Inputs are rounded as Quire's products do, not by fixed scales. Those of floats are not rounded."""
    if group.section("output_activations") is not None:
        raise UnsupportedModelError(
            f"{group.source}: output_activations is not supported; take a checkpoint without it"
        )
    inputs = group.section("input_activations")
    if inputs is not None and inputs.get("dynamic") is not True and format != "float-quantized":
        raise UnsupportedModelError(
            f"{inputs.source}: static scales of inputs are not supported; take a checkpoint with dynamic ones"
        )
