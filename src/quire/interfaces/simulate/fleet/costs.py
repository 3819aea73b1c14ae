"""How long a step takes on a real machine, from the rows of `quire bench steps`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from quire.common.batch import Batch
from quire.common.errors import ConfigError

Number = Annotated[int, Meta(ge=1, le=10_000_000)]


class StepRow(msgspec.Struct, frozen=True):
    """One measured kind of step, a line of the file; other fields of the line are ignored."""

    kind: Literal["prefill", "decode"]
    num_seqs: Number
    num_tokens: Number
    """Tokens computed in the step: of equal prompts, or one for each sequence."""
    context: Annotated[int, Meta(ge=0, le=10_000_000)]
    """Tokens of each sequence that were computed before."""
    step_ms: Annotated[float, Meta(gt=0, le=1e9)]
    tensor_parallel_size: Number = 1
    model: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    """`none` for weights in `dtype`."""
    num_threads: Number | None = None
    """Those of each rank, where the number was given."""


_MEASURED_WITH = {
    "model": "models",
    "dtype": "dtypes",
    "quantization": "quantizations",
    "num_threads": "numbers of threads",
}
"""Fields of a row that are the same in all rows of a curve, with their plural."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a step: a piecewise linear curve over its tokens, plus seconds for each sequence that draws, for each
    token of context that is read, for each pair of tokens in the attention of prompts, and for having a prompt: only
    steps without one are replayed from recordings."""

    tokens: tuple[int, ...]
    token_curve_s: tuple[float, ...]
    draw_s: float
    context_s: float
    pair_s: float
    prompt_s: float
    speedup: float = 1.0
    """The curve is that of one engine; one of more ranks takes this many times less."""
    swapped_block_s: float = 2e-5

    def seconds(self, batch: Batch | None, num_decodes: int = 0, context: int = 0) -> float:
        """Return the seconds of a step that computes the batch, if any, and beside it a token each of `num_decodes`
        sequences, behind `context` tokens in all."""
        num_tokens = num_draws = num_decodes
        pairs, swapped, has_prompt = 0.0, 0, False
        if batch is not None:
            for scheduled in batch.sequences:
                num, start = len(scheduled.token_ids), scheduled.start
                num_tokens += num
                context += start
                num_draws += scheduled.drawn is not None
                has_prompt |= scheduled.drawn is None or num > scheduled.drawn.num_rows
                if num > 1:
                    pairs += num * (start + num / 2)
            swapped = sum([len(transfer.pairs) for transfer in batch.transfers])
        own_s = self.draw_s * num_draws + self.context_s * context + self.pair_s * pairs + self.prompt_s * has_prompt
        return (self._tokens_s(num_tokens) + own_s) / self.speedup + self.swapped_block_s * swapped

    def _tokens_s(self, num_tokens: int) -> float:
        """The curve at a number of tokens, which goes on with its last slope; a step without tokens takes no time."""
        if not num_tokens:
            return 0.0
        place = min(max(1, bisect_left(self.tokens, num_tokens)), len(self.tokens) - 1)
        (left, right), (low_s, high_s) = self.tokens[place - 1 : place + 1], self.token_curve_s[place - 1 : place + 1]
        return max(low_s + (high_s - low_s) * (num_tokens - left) / (right - left), min(self.token_curve_s))


def read_costs(
    path: Path, degree: int = 1, efficiency: float | None = None, planned: Mapping[str, str | int | None] | None = None
) -> CostCurve:
    """Return the curve of engines with this degree of tensor parallelism. Raises ConfigError.

    It is fitted to the rows of this degree or, given an `efficiency`, to those of degree 1, whose times are divided by
    degree * efficiency. `planned`: the model, dtype, quantization and number of threads of the engines. What a row says
    of these, with models by the last part of their name, must be the same.
    """
    rows = _read(path)
    measured = sorted({row.tensor_parallel_size for row in rows})
    wanted = degree if efficiency is None else 1
    if wanted not in measured:
        raise ConfigError(
            f"{path} has no rows of tensor_parallel_size {wanted}, only of {', '.join(map(str, measured))}: measure "
            "them with quire bench steps, or state with --parallel-efficiency what share of the ideal speed is reached"
        )
    if efficiency is not None and not 0 < efficiency <= 1:
        raise ConfigError(f"--parallel-efficiency {efficiency:g}: must be more than 0 and at most 1")
    speedup = 1.0 if degree == 1 or efficiency is None else degree * efficiency
    rows = [row for row in rows if row.tensor_parallel_size == wanted]
    _check_engine(path, rows, planned or {})
    return fit(rows, speedup)


def _check_engine(path: Path, rows: Sequence[StepRow], planned: Mapping[str, str | int | None]) -> None:
    for name, plural in _MEASURED_WITH.items():
        found = sorted({getattr(row, name) for row in rows} - {None})
        if len(found) > 1:
            raise ConfigError(f"{path} has rows of several {plural}, {', '.join(map(str, found))}: keep those of one")
        own = planned.get(name)
        if found and own is not None and Path(str(found[0])).name != Path(str(own)).name:
            raise ConfigError(
                f"{path} was measured with {name} {found[0]}, but the engines are planned with {own}: measure such an "
                "engine with quire bench steps"
            )


def fit(rows: Sequence[StepRow], speedup: float = 1.0) -> CostCurve:
    """Fit the curve by least squares of relative errors. Raises ConfigError if there are too few kinds of rows."""
    nodes = sorted({row.num_tokens for row in rows})
    if len(nodes) < 2 or {row.kind for row in rows} != {"prefill", "decode"}:
        raise ConfigError("costs need rows of both kinds, prefill and decode, of at least two numbers of tokens")
    features = np.zeros((len(rows), len(nodes) + 4))
    seconds = np.array([row.step_ms / 1e3 for row in rows])
    for place, row in enumerate(rows):
        features[place, nodes.index(row.num_tokens)] = 1
        pairs = row.num_tokens * (row.context + row.num_tokens / row.num_seqs / 2) if row.kind == "prefill" else 0.0
        features[place, -4:] = row.num_seqs, row.context * row.num_seqs, pairs, row.kind == "prefill"
    solved = _non_negative(features / seconds[:, None], np.ones(len(rows)))
    draw_s, context_s, pair_s, prompt_s = solved[-4:].tolist()
    return CostCurve(tuple(nodes), tuple(solved[:-4].tolist()), draw_s, context_s, pair_s, prompt_s, speedup)


def _non_negative(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of at least 0: those that would be negative are left out, worst first."""
    kept, scale = list(range(features.shape[1])), np.abs(features).max(axis=0)
    solved = np.zeros(features.shape[1])
    while kept:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], wanted, rcond=None)[0]
        if found.min() >= 0:
            solved[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return solved


def _read(path: Path) -> list[StepRow]:
    decoder, rows = msgspec.json.Decoder(StepRow), list[StepRow]()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows: write them with quire bench steps")
    return rows
