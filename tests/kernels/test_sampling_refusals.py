"""The sampling kernels refuse wrong arguments before they compute anything."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels import TokenLists
from tests.kernels.draws import drawing, lists, make_changes


class TestRefusals:
    def call(self, **given: Any) -> Tensor:
        logits = given.pop("logits", torch.zeros(2, 5))
        changes = make_changes([{"history": ([1], [2]), "banned": [3], "bias": {4: 1.0}, "mask": [0]}] * 2, 5)
        names = changes.__dataclass_fields__
        changes = dataclasses.replace(changes, **{n: v for n, v in given.items() if n in names})
        how = dataclasses.replace(drawing(2, changes=changes), **{n: v for n, v in given.items() if n not in names})
        return kernels.sample(logits, how)

    def test_nothing_where_all_is_well(self):
        assert self.call().tolist() == [0, 0]

    @pytest.mark.parametrize(
        "logits", [torch.zeros(2, 5).bfloat16(), torch.zeros(5, 2).T, torch.zeros(2, 0), torch.zeros(2)]
    )
    def test_wrong_logits(self, logits):
        with pytest.raises(KernelError, match=r"sample takes float32 logits .*; got logits: "):
            self.call(logits=logits)

    @pytest.mark.parametrize(
        "given",
        [
            {"temperature": torch.ones(3).double()},
            {"top_k": torch.ones(2).double()},
            {"top_p": torch.ones(2)},
            {"min_p": torch.ones(4).double()[::2]},
            {"uniform": torch.ones(2, 1).double()},
            {"mask_of": torch.zeros(2)},
            {"masks": torch.zeros(2, 2, dtype=torch.int32)},
            {"banned": lists([1])},
            {"bias": torch.zeros(1)},
            {"num_prompt_tokens": torch.zeros(1, dtype=torch.int64)},
            {"penalties": torch.ones(2, 3).double()},
            {"histories": TokenLists(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))},
        ],
    )
    def test_wrong_shapes_strides_and_dtypes(self, given):
        with pytest.raises(KernelError, match=r"sample takes tensors as SamplingTensors .*; got temperature: "):
            self.call(**given)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -0.1),
            ("temperature", torch.nan),
            ("top_p", -0.1),
            ("top_p", 1.1),
            ("top_p", torch.nan),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("uniform", 1.0),
            ("uniform", -0.1),
            ("uniform", torch.nan),
            ("top_k", -1),
            ("mask_of", 2),
            ("mask_of", -2),
            ("history_of", 2),
            ("num_prompt_tokens", 3),
        ],
    )
    def test_values_out_of_range(self, name, value):
        types = {"top_k": torch.int64, "num_prompt_tokens": torch.int64}
        dtype = torch.int32 if name.endswith("_of") else types.get(name, torch.float64)
        with pytest.raises(KernelError, match=name):
            self.call(**{name: torch.tensor([0, value], dtype=dtype)})

    @pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
    def test_a_repetition_penalty_that_is_not_positive(self, value):
        with pytest.raises(KernelError, match="repetition_penalty"):
            self.call(penalties=torch.tensor([[1.0, 0.0, 0.0], [value, 0.0, 0.0]]))

    @pytest.mark.parametrize("name", ["banned", "biased", "histories"])
    @pytest.mark.parametrize("token_id", [-1, 5])
    def test_token_ids_beyond_the_vocabulary(self, name, token_id):
        bias = {"bias": torch.zeros(3)}
        with pytest.raises(KernelError, match=rf"{name} has token id {token_id}"):
            self.call(**{name: lists([1], [token_id, 2]), **(bias if name == "biased" else {})})

    @pytest.mark.parametrize("starts", [[0, 2, 1], [1, 1, 2], [0, 1, 3]])
    def test_lists_that_reach_out_of_their_ids(self, starts):
        with pytest.raises(KernelError, match="starts of banned"):
            self.call(banned=TokenLists(torch.tensor(starts), torch.zeros(2, dtype=torch.int32)))

    def test_rows_of_processed_logits(self):
        with pytest.raises(KernelError, match="row 2 is not in"):
            kernels.processed_logits(torch.zeros(2, 5), drawing(2), torch.tensor([2]))

    @pytest.mark.parametrize(
        ("rows", "token_ids", "num_top", "message"),
        [
            ([0, 2], [0, 0], 1, "row 2 is not in"),
            ([0, 1], [5, 0], 1, "token id 5 is not in"),
            ([0, 1], [0], 1, "of one length"),
            ([0, 1], [0, 0], 6, "up to vocab; got .*num_top: 6"),
        ],
    )
    def test_logprobs(self, rows, token_ids, num_top, message):
        with pytest.raises(KernelError, match=message):
            kernels.top_logprobs(torch.zeros(2, 5), torch.tensor(token_ids), num_top, rows=torch.tensor(rows))
