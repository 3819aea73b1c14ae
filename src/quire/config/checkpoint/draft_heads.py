"""Draft heads (EAGLE, EAGLE-3, layers for multi-token prediction): what a checkpoint has of one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.config.checkpoint.architectures import MODELS
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.gguf.files import is_gguf
from quire.config.checkpoint.hf_names import standard_names
from quire.config.checkpoint.location import CONFIG_FILE, Location
from quire.config.checkpoint.tensors import Checkpoint
from quire.config.hf_config import HFConfig

if TYPE_CHECKING:
    from quire.config.model import ModelConfig

OUTPUT = -1
"""In the place of a layer's number: what the model gives."""
_TARGETS = "d2t"
_MAX_LAYERS = 16
_DEFAULT_FAMILY = "LlamaForCausalLM"
_EAGLE_MARK = re.compile(r"^Eagle3?|Eagle3?$")
"""What the name of a head's architecture has beside the family's."""


HEADS: Mapping[str, tuple[str, str]] = {
    "eagle": (
        "EAGLE (Li et al. 2024), in the authors' and the `speculators` format",
        "a folder with the head, trained for this model: its hidden size and tokens",
    ),
    "eagle3": (
        "EAGLE-3 (Li et al. 2025), in the authors' and the `speculators` format",
        "a folder with the head, trained for this model: its hidden size, tokens and number of layers",
    ),
    "mtp": (
        "multi-token prediction (DeepSeek-AI 2024), with the names of DeepSeek, GLM, ERNIE, MiMo or Qwen",
        "a layer for it in the model's own checkpoint, or in the one that is named as `model`",
    ),
}
"""The draft heads that can be used, by method of `speculative_config`: what they are, and what they need. All are read
from safetensors."""


@dataclass(frozen=True)
class HeadFormat:
    """How checkpoints name the tensors of a head, and in which order it computes."""

    method: str
    """`eagle`, `eagle3` or `mtp`."""
    pattern: str
    """A regular expression for the names of its tensors: others in the checkpoint are not the head's."""
    renames: tuple[tuple[str, str], ...]
    """(regular expression, replacement): applied one after the other they give the names that `DraftHead` has."""
    ignored: str = "$^"
    """A regular expression for renamed tensors that are not read."""
    is_state_first: bool = False
    """Whether the hidden state comes before the token in what `fc` multiplies."""
    passes_norm: bool = False
    """Whether the next pass reads the normed output."""
    required: tuple[str, ...] = ()
    """Tensors that every checkpoint of this format has, as it names them."""

    def weight_name(self, checkpoint_name: str) -> str | None:
        """The head's name for a tensor; None for one that it does not read."""
        if not re.match(self.pattern, checkpoint_name):
            return None
        name = checkpoint_name
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return None if re.search(self.ignored, name) else name


_EAGLE_NAMES = (
    (r"^model\.", ""),
    (r"^(midlayer|transformer)\.", "layers.0."),
    (r"^fusion_fc\.", "fc."),
    (r"^embedding_layernorm\.", "token_norm."),
    (r"^hidden_states_layernorm\.", "state_norm."),
    (r"^(norm|pre_lm_head_layernorm)\.", "out_norm."),
)
_NOT_READ = r"^(t2d|d2t)$|^verifier_|rotary_emb\.inv_freq$"
EAGLE = HeadFormat("eagle", "", _EAGLE_NAMES, _NOT_READ)
EAGLE3 = HeadFormat("eagle3", "", _EAGLE_NAMES, _NOT_READ, required=("norm.weight",))
_SHARED = r"^(embed_tokens|lm_head)\."
"""What a layer for multi-token prediction shares with the model, of which the checkpoint may have a copy."""


def _behind_the_last_layer(hf: HFConfig) -> HeadFormat:
    """DeepSeek-V3's names, which GLM uses too."""
    modules = "enorm|hnorm|eh_proj|shared_head|embed_tokens"
    renames = (
        (rf"^model\.layers\.\d+\.(?!{modules})", "layers.0."),
        (r"^model\.layers\.\d+\.", ""),
        ("^enorm", "token_norm"),
        ("^hnorm", "state_norm"),
        ("^eh_proj", "fc"),
        (r"^shared_head\.norm", "out_norm"),
        (r"^shared_head\.head", "lm_head"),
    )
    layer = f"model.layers.{hf.size('num_hidden_layers')}."
    norms = tuple([f"{layer}{norm}.weight" for norm in ("enorm", "hnorm", "shared_head.norm")])
    return HeadFormat("mtp", f"^{re.escape(layer)}", renames, _SHARED, required=norms)


def _ernie(hf: HFConfig) -> HeadFormat:
    names = {"emb_norm": "token_norm", "hidden_norm": "state_norm", "linear_proj": "fc", "block": "layers.0"}
    renames = tuple((rf"^model\.mtp_{theirs}\.0\.", f"{ours}.") for theirs, ours in names.items())
    norms = ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight")
    return HeadFormat("mtp", rf"^model\.mtp_({'|'.join(names)})\.0\.", renames, required=norms)


def _mimo(hf: HFConfig) -> HeadFormat:
    modules = {"token_layernorm": "token_norm", "hidden_layernorm": "state_norm", "input_proj": "fc"}
    modules["final_layernorm"] = "norm"
    renames = (
        (rf"^model\.mtp_layers\.0\.(?!{'|'.join(modules)})", "layers.0."),
        (r"^model\.mtp_layers\.0\.", ""),
        *((f"^{theirs}", ours) for theirs, ours in modules.items()),
    )
    norms = tuple([f"model.mtp_layers.0.{norm}.weight" for norm in ("token_layernorm", "hidden_layernorm")])
    return HeadFormat("mtp", r"^model\.mtp_layers\.0\.", renames, is_state_first=True, passes_norm=True, required=norms)


def _qwen(hf: HFConfig) -> HeadFormat:
    norms = (("^pre_fc_norm_embedding", "token_norm"), ("^pre_fc_norm_hidden", "state_norm"))
    required = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    renames = ((r"^mtp\.", ""), *norms)
    return HeadFormat("mtp", r"^mtp\.(?!layers\.[1-9])", renames, passes_norm=True, required=required)


_MTP: tuple[Callable[[HFConfig], HeadFormat], ...] = (_behind_the_last_layer, _ernie, _mimo, _qwen)


@dataclass(frozen=True)
class HeadConfig:
    """What a checkpoint has of a head, checked against the model that it drafts for."""

    format: HeadFormat
    held: frozenset[str]
    """The head's names of the tensors in the checkpoint."""
    state_width: int
    """The width of the model's hidden states."""
    places: tuple[int, ...] = (OUTPUT,)
    """Whose hidden states it reads: what the layer of this number gets, or OUTPUT."""
    targets: tuple[int, ...] | None = field(default=None, repr=False)
    """By token of the head, the model's. None: they have the same tokens."""

    @cached_property
    def has_table(self) -> bool:
        """Whether it has token embeddings of its own, and does not use the model's."""
        return "embed_tokens.weight" in self.held

    @cached_property
    def has_head(self) -> bool:
        """The same for the projection to the vocabulary."""
        return "lm_head.weight" in self.held

    @property
    def state_elements(self) -> int:
        """Of the hidden states of a token: as the model keeps them for the head, and as the head reads them, side by
        side and then as one beside the embeddings."""
        return (3 * len(self.places) + 2) * self.state_width


def resolve_head(target: ModelConfig, name: str | None, method: str | None) -> ModelConfig | None:
    """The head in the checkpoint `name`, or in the target's own (None), as the config of a model that computes in the
    target's dtype. Without a `method`, the tensors tell; None if they are no head's.

    Reads headers, and the table of the head's tokens. Raises CheckpointError for a head that is incomplete or does not
    fit the target, ConfigError if it is of another method.
    """
    path = target.path if name is None else _path(name)
    if is_gguf(path):
        if method is None:
            return None
        raise UnsupportedModelError(f"{path}: draft heads are read from safetensors, not from GGUF files")
    checkpoint = open_checkpoint(path, drafts=name is not None)
    format = _find_format(checkpoint, target.hf_config) or (None if name is None else _incomplete(checkpoint, path))
    if format is None or (method is not None and format.method != method):
        if method is None:
            return None
        raise ConfigError(
            f"speculative_config: {path} has {'no draft head' if format is None else f'a head for {format.method!r}'}, "
            f"so method={method!r} cannot use it; name a checkpoint with one as 'model'"
        )
    if target.model_impl != "quire":
        raise ConfigError("speculative_config: a draft head needs a model that Quire runs itself, not transformers'")
    if format.method == "mtp":
        hf, architecture = _with_one_more_layer(target.hf_config), target.architecture
        stated = hf if name is None else standard_names(HFConfig.read(path / CONFIG_FILE))
    else:
        hf, architecture = _head_values(
            HFConfig.read(path / CONFIG_FILE), target, _num_layers(checkpoint, format, path)
        )
        stated = hf
    head = _checked(format, checkpoint, hf, target)
    num_drafted = target.vocab_size if head.targets is None else len(head.targets)
    known = {"vocab_size": target.vocab_size, "draft_vocab_size": num_drafted, "target_hidden_size": head.state_width}
    _check_stated(stated, known)
    stored = format.method == "mtp" and target.quant_method is not None and _is_quantized_as(path, target)
    return dataclasses.replace(
        target,
        model=target.model if name is None else name,
        path=path,
        hf_config=hf,
        architecture=architecture,
        quantization=target.quantization if stored else None,
        quant_method=target.quant_method if stored else None,
        head_quantization=None,
        weights_from_file="never",
        head=head,
    )


def _num_layers(checkpoint: Checkpoint, format: HeadFormat, path: Path) -> int:
    """Raises CheckpointError unless the layers of the tensors are few and have the numbers from 0 on."""
    matches = [re.match(r"layers\.(\d+)\.", format.weight_name(name) or "") for name in checkpoint.tensors]
    numbers = {match[1] for match in matches if match}
    if wrong := numbers - {str(number) for number in range(len(numbers))}:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: this draft head has a layer {min(wrong)[:80]!r}, but not all from 0 on before it"
        )
    if len(numbers) > _MAX_LAYERS:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: this draft head has {len(numbers)} layers, more than {_MAX_LAYERS}"
        )
    return max(1, len(numbers))


def _is_quantized_as(path: Path, target: ModelConfig) -> bool:
    """Whether the checkpoint is the target's, or is quantized in the same way."""
    key = "quantization_config"
    return not is_gguf(target.path) and HFConfig.read(path / CONFIG_FILE).get(key) == target.hf_config.get(key)


def own_head(model: ModelConfig) -> str | None:
    """The method of the head in the model's own checkpoint, such as `mtp`; None if there is none."""
    if model.runner == "pooling" or model.head is not None or is_gguf(model.path):
        return None
    format = _find_format(open_checkpoint(model.path), model.hf_config)
    return None if format is None else format.method


def _path(name: str) -> Any:
    location = Location(name)
    return location.complete(location.find())


def _find_format(checkpoint: Checkpoint, target: HFConfig) -> HeadFormat | None:
    names = {EAGLE3.weight_name(name) for name in checkpoint.tensors} | set(checkpoint.tensors)
    if "layers.0.hidden_norm.weight" in names or _TARGETS in names:
        return EAGLE3
    if any(name is not None and name.startswith("fc.") for name in names):
        return EAGLE
    formats = [make(target) for make in _MTP]
    return next((each for each in formats if any(each.weight_name(name) for name in checkpoint.tensors)), None)


def _incomplete(checkpoint: Checkpoint, path: Path) -> HeadFormat | None:
    """The format of an EAGLE head without `fc`; None for other checkpoints. Either config.json says that it is a head,
    or there is a layer without the final norm that a model has."""
    hf, names = HFConfig.read(path / CONFIG_FILE), checkpoint.tensors
    architectures = hf.get("architectures")
    named = _EAGLE_MARK.search(str(architectures[0])) if isinstance(architectures, list) and architectures else None
    method = hf.get("speculators_model_type") or (named[0].lower() if named else None)
    if method is None and "layers.0.post_attention_layernorm.weight" in names and "norm.weight" not in names:
        return EAGLE
    return next((format for format in (EAGLE, EAGLE3) if format.method == method), None)


def _head_values(hf: HFConfig, target: ModelConfig, num_layers: int) -> tuple[HFConfig, str]:
    """What config.json says of a head, in its own or the `speculators` format, and the architecture of its layers."""
    layers = hf.section("transformer_layer_config")
    named = (hf if layers is None else layers).get("architectures")
    values: dict[str, Any] = {"max_position_embeddings": target.max_position_embeddings, **hf}
    if layers is not None:
        values = {"norm_before_residual": True, **values, **layers}
    text = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else _DEFAULT_FAMILY
    architecture = _EAGLE_MARK.sub("", text)
    if architecture not in MODELS:
        raise UnsupportedModelError(f"{hf.source}: a draft head of the architecture {text[:80]!r} is not supported")
    known = standard_names(HFConfig({**values, "architectures": [architecture]}, hf.source))
    _check_stated(known, {"num_hidden_layers": num_layers})
    return HFConfig({**known, "num_hidden_layers": num_layers}, hf.source), architecture


def _check_stated(hf: HFConfig, known: Mapping[str, int]) -> None:
    """Raises CheckpointError if config.json contradicts what is known of a head from its tensors and its model."""
    for key, number in known.items():
        if (given := hf.count(key, number)) != number:
            raise CheckpointError(
                f"{hf.source}: {key!r} is {given}, but this draft head's tensors and the model that it drafts for have "
                f"{number}: take a head that was trained for this model, or correct the file"
            )


def _with_one_more_layer(hf: HFConfig) -> HFConfig:
    """The values of a model with the layer behind its last one."""
    num_layers, values = hf.size("num_hidden_layers"), dict(hf)
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(types := values.get(key), list) and len(types) == num_layers:
            values[key] = [*types, types[-1]]
    if values.get("moe_layer_end_index", -1) == -1:
        values["moe_layer_end_index"] = num_layers - 1  # ERNIE's has no experts
    return HFConfig({**values, "num_hidden_layers": num_layers + 1}, hf.source)


def _checked(format: HeadFormat, checkpoint: Checkpoint, hf: HFConfig, target: ModelConfig) -> HeadConfig:
    """Raises CheckpointError unless the head fits the target."""
    shapes = {format.weight_name(name): info.shape for name, info in checkpoint.tensors.items()}
    where, width, theirs = f"{hf.source}: this draft head", hf.size("hidden_size"), target.hf_config.size("hidden_size")
    places = _places(hf, target.hf_config) if format.method == "eagle3" else (OUTPUT,)
    expected = (width, len(places) * theirs if format.method == "eagle3" else width + theirs)
    if shapes.get("fc.weight") != expected:
        stored = shapes.get("fc.weight")
        if stored is None:
            raise CheckpointError(f"{where} has no fc.weight, which must be {list(expected)}: it is incomplete")
        raise CheckpointError(
            f"{where} has fc.weight {list(stored)}, where hidden states of {theirs} elements need {list(expected)}; "
            "it was not trained for this model"
        )
    if missing := [name for name in format.required if format.weight_name(name) not in shapes]:
        raise CheckpointError(f"{where} has no {', '.join(missing)}: it is incomplete")
    targets = _targets(checkpoint, where, target.vocab_size)
    held = frozenset(name for name in shapes if name is not None)
    head = HeadConfig(format, held, theirs, places, targets)
    if not (head.has_table and head.has_head) and width != theirs:
        raise CheckpointError(f"{where} shares the model's embeddings, so its hidden_size {width} must be {theirs}")
    num_drafted = target.vocab_size if targets is None else len(targets)
    wanted = {"embed_tokens.weight": (target.vocab_size, width), "lm_head.weight": (num_drafted, width)}
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            raise CheckpointError(f"{where} has {name} {list(shapes[name])} instead of {list(shape)}: other tokens")
    if targets is not None and not head.has_head:
        raise CheckpointError(f"{where} drafts {num_drafted} tokens, but has no lm_head.weight")
    return head


def _places(hf: HFConfig, target: HFConfig) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads: those that it names, or low, middle and high ones."""
    num_layers = target.size("num_hidden_layers")
    key = "eagle_aux_hidden_state_layer_ids"
    section = hf.section("eagle_config")
    named = hf.get(key) or (None if section is None else section.get(key))
    if named is None:
        if num_layers < 3:
            raise CheckpointError(f"{hf.source}: EAGLE-3 needs a model of 3 layers or more, not of {num_layers}")
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(named, list) or not all(type(place) is int and 0 <= place < num_layers for place in named):
        raise CheckpointError(f"{hf.source}: {key!r} must be a list of layers' numbers below {num_layers}")
    return tuple(named)


def _targets(checkpoint: Checkpoint, where: str, vocab_size: int) -> tuple[int, ...] | None:
    """The model's token of each of the head's: `d2t` has how far it is away."""
    info = checkpoint.tensors.get(_TARGETS)
    if info is None:
        return None
    if info.dtype != "int64" or len(info.shape) != 1 or info.shape == (0,):
        raise CheckpointError(f"{where} has d2t {info.dtype} {list(info.shape)} instead of a non-empty list of int64")
    if info.shape[0] > vocab_size:
        raise CheckpointError(f"{where} has d2t for {info.shape[0]} tokens, but the model has {vocab_size}")
    with checkpoint.reading(_TARGETS) as data:
        targets = tuple([token_id + offset for token_id, offset in enumerate(data.cast("B").cast("q"))])
    if wrong := [token_id for token_id in targets if not 0 <= token_id < vocab_size]:
        raise CheckpointError(f"{where} has d2t for the token {wrong[0]}, but the model has {vocab_size} tokens")
    if len(set(targets)) < len(targets):
        raise CheckpointError(f"{where} has a d2t that gives two of its tokens the same token of the model")
    return targets


def verifier_of(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Of a folder or hub id in the `speculators` format: the model that its head drafts for, and a speculative_config.
    None for another checkpoint."""
    path = Location(name).find()
    hf = HFConfig.read(path / CONFIG_FILE) if path.is_dir() else HFConfig({}, name)
    section = hf.section("speculators_config")
    if section is None:
        return None
    verifier = section.section("verifier")
    if verifier is None or not verifier.get("name_or_path"):
        raise CheckpointError(
            f"{hf.source} does not say which model it drafts for; give that as the model, and {name} as the 'model' of "
            "speculative_config"
        )
    proposals = section.get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    config: dict[str, Any] = {"method": hf.text("speculators_model_type"), "model": name}
    return verifier.text("name_or_path"), config | ({} if tokens is None else {"num_speculative_tokens": tokens})
