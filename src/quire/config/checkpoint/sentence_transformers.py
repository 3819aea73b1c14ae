"""What a folder of sentence-transformers says besides the model: its modules, prompts and limits. Reads no weights.

Its files: `modules.json` lists the modules that a text goes through, each with a folder of its own;
`sentence_bert_config.json` is that of the first, the model itself; `config_sentence_transformers.json` has prompts, and
says whether the modules are a cross-encoder.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.runners import MODULES_FILE
from quire.config.hf_config import HFConfig, read_json_list

WEIGHTS_FILE = "model.safetensors"
_MAX_MODULES = 16
_MAX_PROMPTS = 1024
_FOLDER = re.compile(r"[A-Za-z0-9][\w-]*")
_TYPE = re.compile(r"sentence_transformers(\.\w+)+|pylate\.models\.Dense\.Dense")
"""Besides those of sentence-transformers, PyLate's layer for vectors of tokens (ColBERT), which have length 1."""
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PROMPTS_FILE = "config_sentence_transformers.json"
_WAYS = (
    ("cls_token", "cls", "first"),
    ("max_tokens", "max", "max"),
    ("mean_tokens", "mean", "mean"),
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", "sum_by_root"),
    ("weightedmean_tokens", "weightedmean", "weighted_mean"),
    ("lasttoken", "lasttoken", "last"),
)
"""Of each way of pooling the name in `pooling_mode_...`, in the order in which vectors are joined; that in
`pooling_mode`, which states an order; and ours."""
_NAMED_MODES = {named: ours for _, named, ours in _WAYS}
_ACTIVATIONS = {
    "Identity": None, "Tanh": "tanh", "Sigmoid": "sigmoid", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseModule:
    """`activation(x @ weight.T + bias)`, whose weights are in a file of the module's folder."""

    in_features: int
    out_features: int
    has_bias: bool
    activation: str | None
    folder: Path


@dataclass(frozen=True, slots=True)
class NormModule:
    """LayerNorm, whose weights are in a file of the module's folder."""

    width: int
    folder: Path


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """How hidden states become an embedding."""

    modes: tuple[str, ...]
    """`first` and `last` row, or a way of kernels.pool_rows; the vectors of several are joined. Empty: each token keeps
    its vector."""
    steps: tuple[DenseModule | NormModule, ...] = ()
    """What an embedding goes through after that."""
    normalizes: bool = True
    """Whether it is scaled to length 1 at the end."""
    num_scores: int = 0
    """Number of logits that a cross-encoder makes instead."""


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """What the model was made for, beside its arithmetic."""

    max_seq_length: int | None = None
    """The most tokens of a text that it was trained with."""
    do_lower_case: bool = False
    """Whether texts become lower case before they are tokenized."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> what is put before a text of that kind."""


def read_sentence_config(folder: Path) -> SentenceConfig:
    """Raises CheckpointError for malformed files; a folder without any has the defaults."""
    if not folder.is_dir():
        return SentenceConfig()
    files = [folder / name for name in _TRANSFORMER_FILES]
    transformer = HFConfig.read(next((file for file in files if file.exists()), files[0]), required=False)
    values = HFConfig.read(folder / _PROMPTS_FILE, required=False)
    prompts = values.get("prompts") or {}
    if (
        not isinstance(prompts, dict)
        or len(prompts) > _MAX_PROMPTS
        or not all(text is None or isinstance(text, str) for text in prompts.values())
    ):
        raise CheckpointError(f"{values.source}: 'prompts' must be an object of at most {_MAX_PROMPTS} texts")
    prompts = {name: text for name, text in prompts.items() if text is not None}
    limit = None if transformer.get("max_seq_length") is None else transformer.size("max_seq_length")
    return SentenceConfig(limit, transformer.flag("do_lower_case", False), prompts)


def read_cross_encoder(folder: Path) -> HFConfig | None:
    """What sentence-transformers 6 says of a cross-encoder beside `config.json`; None in other folders."""
    values = HFConfig.read(folder / _PROMPTS_FILE, required=False)
    return values if values.text("model_type", "") == "CrossEncoder" else None


def read_modules(folder: Path, hidden_size: int) -> SentenceModules | None:
    """What `modules.json` says; None in a folder without the file. Raises CheckpointError if it is malformed or does
    not fit, and UnsupportedModelError if it names a module that Quire does not have."""
    path = folder / MODULES_FILE
    if not folder.is_dir() or not path.exists():
        return None
    entries = read_json_list(path)
    if not 0 < len(entries) <= _MAX_MODULES or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{path} must list 1 to {_MAX_MODULES} modules, each an object with 'path' and 'type'")
    read = _Modules(path, hidden_size, is_cross_encoder=read_cross_encoder(folder) is not None)
    for index, entry in enumerate(entries):
        read.add(index, HFConfig(entry, f"{path}: module {index}"))
    if read.is_cross_encoder and not read.num_scores:
        raise UnsupportedModelError(f"{path}: a CrossEncoder must end with a Dense whose output is 'scores'")
    return SentenceModules(read.modes, tuple(read.steps), read.normalizes or read.are_late, read.num_scores)


def weights_folder(module: DenseModule | NormModule) -> Path:
    """The folder with the weights of a module. Raises CheckpointError if it has none."""
    if not (module.folder / WEIGHTS_FILE).exists():
        raise CheckpointError(f"{module.folder} has no {WEIGHTS_FILE}; pickles (*.bin, *.pt) are never read")
    return module.folder


class _Modules:
    """Reads modules in their order, and how wide a vector is after each."""

    def __init__(self, path: Path, hidden_size: int, *, is_cross_encoder: bool) -> None:
        self.modes: tuple[str, ...] = ()
        self.steps: list[DenseModule | NormModule] = []
        self.normalizes = False
        self.are_late = False
        """Whether vectors of tokens are compared, and none are pooled (PyLate)."""
        self.is_cross_encoder = is_cross_encoder
        self.num_scores = 0
        """What the last module makes; 0 if it makes something else."""
        self._path, self._width = path, hidden_size

    def add(self, index: int, entry: HFConfig) -> None:
        """Read the next module."""
        kind, where = entry.text("type"), entry.text("path", "")
        name = kind.rpartition(".")[2]
        if not _TYPE.fullmatch(kind) or name not in self._READERS:
            known = ", ".join(self._READERS)
            raise UnsupportedModelError(
                f"{entry.source}: the module {kind[:80]!r} is not supported: sentence_transformers' {known} are, and a "
                "checkpoint's own Python code is never run"
            )
        if (index == 0) != (name == "Transformer"):
            raise UnsupportedModelError(f"{entry.source}: {name} as module {index}: the first one is the Transformer")
        if name != "Transformer" and name != "Normalize" and not _FOLDER.fullmatch(where):
            raise CheckpointError(
                f"{entry.source}: 'path' is {where[:80]!r}, but must be the name of a folder beside it"
            )
        self.num_scores = 0
        self._READERS[name](self, entry, self._path.parent / where)

    def _transformer(self, entry: HFConfig, folder: Path) -> None:
        if entry.text("path", ""):
            raise UnsupportedModelError(f"{entry.source}: the model must be beside {MODULES_FILE}, not in a folder")

    def _pooling(self, entry: HFConfig, folder: Path) -> None:
        values = HFConfig.read(folder / "config.json")
        width = values.size("word_embedding_dimension", values.size("embedding_dimension", self._width))
        if width != self._width or self.modes or self.steps:
            raise CheckpointError(f"{values.source}: pools vectors of {width}, but must pool once, those of the model")
        if not values.flag("include_prompt", True):
            raise UnsupportedModelError(f"{values.source}: 'include_prompt' is false: not supported")
        stated = values.get("pooling_mode")
        if stated is None:
            modes = tuple(ours for name, _, ours in _WAYS if values.flag(f"pooling_mode_{name}", False))
        else:
            names = stated if isinstance(stated, list) else [stated]
            if unknown := [name for name in names if not isinstance(name, str) or name not in _NAMED_MODES]:
                known = ", ".join(_NAMED_MODES)
                raise CheckpointError(f"{values.source}: 'pooling_mode' has {unknown[0]!r:.80}: supported are {known}")
            modes = tuple(_NAMED_MODES[name] for name in names)
        if not modes:
            raise CheckpointError(
                f"{values.source}: no pooling mode is chosen: supported are {', '.join(_NAMED_MODES)}"
            )
        self.modes, self._width = modes, self._width * len(modes)

    def _dense(self, entry: HFConfig, folder: Path) -> None:
        values = HFConfig.read(folder / "config.json")
        if values.flag("use_residual", False):
            raise UnsupportedModelError(f"{values.source}: 'use_residual' is true: not supported")
        given = values.text("module_input_name", "sentence_embedding")
        made = values.text("module_output_name", given)
        expected = "sentence_embedding" if self.modes else given
        makes_scores = self.is_cross_encoder and made == "scores" and bool(self.modes)
        if given != expected or (made != expected and not makes_scores):
            raise UnsupportedModelError(f"{values.source}: a Dense from {given!r} to {made!r} is not supported here")
        self.are_late |= entry.text("type").startswith("pylate")
        module = DenseModule(
            values.size("in_features"),
            values.size("out_features"),
            values.flag("bias", True),
            read_activation(values, "activation_function", "torch.nn.modules.activation.Tanh"),
            folder,
        )
        self._add_step(module, module.in_features, values.source)
        self._width = module.out_features
        self.num_scores = module.out_features if makes_scores else 0

    def _layer_norm(self, entry: HFConfig, folder: Path) -> None:
        values = HFConfig.read(folder / "config.json")
        self._add_step(NormModule(values.size("dimension"), folder), values.size("dimension"), values.source)

    def _add_step(self, module: DenseModule | NormModule, width: int, source: str) -> None:
        if width != self._width or self.normalizes:
            raise CheckpointError(
                f"{source}: takes vectors of {width}, but gets {self._width}, before they are normalized"
            )
        self.steps.append(module)

    def _normalize(self, entry: HFConfig, folder: Path) -> None:
        self.normalizes = True

    _READERS: Mapping[str, Any] = {
        "Transformer": _transformer,
        "Pooling": _pooling,
        "Dense": _dense,
        "LayerNorm": _layer_norm,
        "Normalize": _normalize,
    }


def read_activation(values: HFConfig, key: str, default: str) -> str | None:
    """The activation that a class of torch stands for, by its full name; None: the value itself."""
    name = values.text(key, default)
    prefix, _, own = name.rpartition(".")
    if prefix not in ("torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn") or own not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"{values.source}: {key!r} is {name[:80]!r}, supported are torch.nn's {known}")
    return _ACTIVATIONS[own]
