"""Mixtures of experts: routed as the reference says, each row with the bits that its expert's matrix gives it alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels import Routing
from quire.kernels.backends import reference
from tests.effort import examples

from .isas import ISAS, needs_native, using
from .test_matmul import DTYPES, make_weight, randn
from .test_quantized_formats import random_blocks
from .tolerances import assert_close

ROUTINGS = {
    "softmax": Routing(2, 8),
    "normalized": Routing(4, 37, is_normalized=True),
    "all": Routing(5, 5, scale=2.5),
    "one": Routing(1, 1),
    "groups": Routing(3, 12, num_groups=4, top_groups=2, scale=16.0),
    "sigmoid": Routing(2, 33, "sigmoid"),
    "pairs": Routing(4, 32, "sigmoid", True, 2.5, num_groups=8, top_groups=3, has_pairs=True),
    "sparsemixer": Routing(2, 16, "sparsemixer", jitter=0.01),
    "wide-sparsemixer": Routing(3, 16, "sparsemixer", jitter=0.4),
}


def has_bias(routing):
    return routing.scoring == "sigmoid" or routing.is_normalized


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_references_experts_are_chosen_and_weighed(isa, name):
    routing = ROUTINGS[name]
    for rows in (0, 1, 2, 7, 150):
        logits = randn(rows, routing.num_experts, seed=rows) * 3
        for bias in (None, randn(routing.num_experts, seed=1) / 4) if has_bias(routing) else (None,):
            expected_ids, expected = reference.route(logits, routing, bias)
            with using(isa):
                ids, weights = kernels.route(logits, routing, bias)
            assert torch.equal(ids, expected_ids)
            assert_close("route", weights, expected)


def test_the_reference_is_what_its_models_compute():
    logits = randn(20, 12)
    probabilities = logits.softmax(1)
    top = probabilities.topk(2, 1)
    ids, weights = reference.route(logits, Routing(2, 12, is_normalized=True), None)
    assert torch.equal(ids.long(), top.indices)
    torch.testing.assert_close(weights, logits.topk(2, 1).values.softmax(1))
    ids, weights = reference.route(logits, Routing(1, 12, "sparsemixer", jitter=1e9), None)
    torch.testing.assert_close(weights, top.values[:, :1])
    chosen = Routing(3, 12, "sigmoid", num_groups=4, top_groups=1, has_pairs=True)
    bias = torch.zeros(12)
    bias[[1, 2]] = 10  # the first group has the two best
    ids, weights = reference.route(logits, chosen, bias)
    assert ids.sort(1).values.tolist() == [[0, 1, 2]] * 20
    assert torch.equal(weights, logits.sigmoid().gather(1, ids.long()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ROUTINGS)
@given(data=st.data())
@settings(max_examples=examples(10), deadline=None)
def test_ties_go_to_the_lower_index_and_nan_counts_as_the_lowest(isa, name, data):
    routing = ROUTINGS[name]
    values = st.sampled_from([0.0, -0.0, 1.0, -2.0, torch.nan, -torch.inf, torch.inf])
    rows = st.lists(values, min_size=routing.num_experts, max_size=routing.num_experts)
    logits = torch.tensor([data.draw(rows, "logits")])
    if routing.has_pairs or routing.scoring == "sparsemixer":  # infinities cancel, or have no distance
        logits = logits.nan_to_num(torch.nan, 3.0, -3.0)
    expected, _ = reference.route(logits, routing, None)
    with using(isa):
        ids, weights = kernels.route(logits, routing)
    assert torch.equal(ids, expected)
    assert len(set(ids[0].tolist())) == routing.top_k
    assert routing.scoring != "softmax" or not logits.isnan().any() or weights.isnan().all()


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_is_routed_alone_as_in_a_batch(isa, name):
    logits = randn(600, ROUTINGS[name].num_experts)
    with using(isa, num_threads=2):
        ids, weights = kernels.route(logits, ROUTINGS[name])
    with using(isa, num_threads=1):
        for row in (0, 1, 299, 599):
            alone, weight = kernels.route(logits[row : row + 1], ROUTINGS[name])
            assert torch.equal(ids[row : row + 1], alone)
            assert torch.equal(weights[row : row + 1], weight)


@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_pairs_are_grouped_by_expert_in_their_order(isa, data):
    num_experts, top_k = data.draw(st.integers(1, 9), "experts"), data.draw(st.integers(1, 4), "top_k")
    tokens = data.draw(st.integers(0, 30), "tokens")
    pairs = st.lists(st.integers(0, num_experts - 1), min_size=tokens * top_k, max_size=tokens * top_k)
    ids = torch.tensor(data.draw(pairs, "ids"), dtype=torch.int32).view(tokens, top_k)
    with using(isa):
        rows = kernels.group_by_expert(ids, num_experts)
    expected = sorted(range(tokens * top_k), key=lambda pair: ids.flatten()[pair].item())
    assert rows.pairs.tolist() == expected
    assert rows.pairs[rows.places.long()].tolist() == list(range(tokens * top_k))
    assert rows.starts.diff().tolist() == [int((ids == e).sum()) for e in range(num_experts)]


def integers(bits, scales, has_zeros, in_order):
    def make(n, k, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
        ranges = -(-k // 64)
        zeros = torch.randint(0, 2**bits, (n, ranges), dtype=torch.uint8, generator=generator) if has_zeros else None
        order = None if in_order else torch.randperm(k, generator=generator).int()
        return kernels.pack_integers(
            [kernels.PlacedIntegers.in_bytes(values, bits)], randn(n, ranges).to(scales), zeros, dtype, 64, order
        )

    return make


def in_blocks(format):
    def make(n, k, dtype, seed):
        elements = kernels.block_size(format)[0]
        return kernels.pack_blocks(random_blocks(format, n + seed, k // elements)[seed:].contiguous(), k, dtype, format)

    return make


def quantized(format):
    return lambda n, k, dtype, seed: kernels.quantize_weight(make_weight(n, k, dtype) * (1 + seed), format)


def packed(n, k, dtype, seed):
    return kernels.pack_weight(make_weight(n, k, dtype) * (1 + seed))


MAKERS = {
    "packed": packed,
    "int8": quantized("int8"),
    "int4": quantized("int4"),
    **{format: in_blocks(format) for format in kernels.BLOCK_FORMATS},
    "gptq": integers(4, torch.float16, True, False),
    "w8": integers(8, torch.bfloat16, False, True),
    "w4": integers(4, torch.float32, True, True),
}


def mixed(makers, n, k, dtype):
    """An expert of each maker."""
    return [make(n, k, dtype, seed) for seed, make in enumerate(makers)]


def check_products(matrices, biases, ids):
    """Each row of the grouped product has the bits of the product by its expert's matrix."""
    n, k, dtype = matrices[0].n, matrices[0].k, matrices[0].dtype
    x = randn(len(ids), k).to(dtype)
    weights = kernels.ExpertWeights(matrices, biases)
    rows = kernels.group_by_expert(ids, len(matrices))
    by_pair = x.repeat_interleave(ids.shape[1], 0)
    grouped = by_pair[rows.pairs.long()]
    for of_tokens, rows_of_x in ((True, x), (False, grouped)):
        out = kernels.expert_matmul(rows_of_x, weights, rows, of_tokens=of_tokens, out_dtype=torch.float32)
        for expert, (first, end) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
            bias = None if biases is None else biases[expert]
            alone = kernels.matmul(grouped[first:end], matrices[expert], bias, torch.float32)
            assert torch.equal(out[first:end], alone), (of_tokens, expert)
    assert kernels.expert_matmul(x, weights, rows, of_tokens=True).dtype == dtype
    assert out.shape == (ids.numel(), n)


def spread(tokens, top_k, num_experts, seed=0):
    """Different experts of each token; the last expert has no rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, num_experts - 1, generator=generator).argsort(1)[:, :top_k].int().contiguous()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_rows_have_the_bits_of_their_experts_products_in_every_format(isa, dtype, name):
    with using(isa):
        matrices = mixed([MAKERS[name]] * 4, 40, 256, dtype)
        check_products(matrices, None, spread(5, 2, 4))
        check_products(matrices, [randn(40, seed=e) for e in range(4)], spread(30, 3, 4))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (300, 515), (64, 1030)])
def test_experts_of_a_layer_may_have_different_formats_and_any_shape(isa, dtype, n, k):
    with using(isa):
        matrices = mixed([MAKERS[name] for name in ("packed", "int8", "int4", "gptq", "w4")], n, k, dtype)
        for tokens in (1, 40):
            check_products(matrices, [randn(n, seed=e) for e in range(5)], spread(tokens, 4, 5))


@pytest.mark.parametrize("name", ["packed", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_all_rows_on_one_expert_and_more_rows_than_are_prepared_at_once(name, dtype, threads):
    with using(ISAS[0], threads):
        matrices = mixed([MAKERS[name]] * 3, 40, 64, dtype)
        check_products(matrices, None, torch.full((230, 1), 1, dtype=torch.int32))
        check_products(matrices, None, torch.arange(3, dtype=torch.int32).repeat(900, 1))


def test_no_tokens_and_no_outputs_give_nothing():
    for n, tokens in ((40, 0), (0, 3)):
        check_products(mixed([packed] * 3, n, 8, torch.float32), None, spread(tokens, 2, 3))


def test_parts_of_different_formats_are_multiplied_apart():
    stacks = [kernels.StackedWeight((packed(33, 64, torch.float32, e), quantized("int4")(20, 64, torch.float32, e)))
              for e in range(3)]  # fmt: skip
    check_products(stacks, [randn(53, seed=e) for e in range(3)], spread(20, 2, 3))


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=examples(10), deadline=None)
def test_a_token_alone_has_the_bits_it_has_in_any_batch_on_any_number_of_threads(isa, dtype, data):
    name = data.draw(st.sampled_from(["packed", "int8", "int4", "q4_k"]), "format")
    tokens, num_experts = data.draw(st.integers(1, 70), "tokens"), data.draw(st.integers(2, 6), "experts")
    top_k, token = data.draw(st.integers(1, num_experts), "top_k"), data.draw(st.integers(0, tokens - 1), "token")
    routing = Routing(top_k, num_experts)
    first, second = (kernels.ExpertWeights(mixed([MAKERS[name]] * num_experts, *size, dtype))
                     for size in ((96, 256), (40, 256)))  # fmt: skip
    x, logits = randn(tokens, 256).to(dtype), randn(tokens, num_experts, seed=3)
    shared, gate = randn(tokens, 40).to(dtype), randn(tokens, 1)

    def run(chosen, threads):
        with using(isa, num_threads=threads):
            ids, weights = kernels.route(logits[chosen], routing)
            rows = kernels.group_by_expert(ids, num_experts)
            wide = kernels.expert_matmul(x[chosen], first, rows, of_tokens=True)
            padded = torch.nn.functional.pad(wide, (0, 160))
            y = kernels.expert_matmul(padded, second, rows, of_tokens=False)
            return kernels.combine_experts(y, weights, rows, shared[chosen], gate[chosen])

    whole = run(slice(None), data.draw(st.integers(1, 3), "threads of the batch"))
    alone = run(slice(token, token + 1), data.draw(st.integers(1, 3), "threads of the token"))
    assert torch.equal(whole[token : token + 1], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(0, 2, 8), (1, 1, 5), (3, 8, 129), (40, 3, 600)])
def test_results_are_summed_with_their_weights(isa, dtype, tokens, top_k, width):
    rows = kernels.group_by_expert(spread(tokens, top_k, 12), 12)
    y, weights = randn(tokens * top_k, width).to(dtype), randn(tokens, top_k).abs()
    shared, gate = randn(tokens, width, seed=1).to(dtype), randn(tokens, 1)
    with using(isa):
        for added in ((), (shared,), (shared, gate)):
            expected = reference.combine_experts(y, weights, rows.places, *(*added, None, None)[:2])
            assert_close("combine_experts", kernels.combine_experts(y, weights, rows, *added), expected)


@needs_native
def test_a_recording_routes_the_tokens_of_each_replay():
    routing, backend, workspace = Routing(2, 4), kernels.backend_for("cpu"), kernels.Workspace()
    matrices = mixed([MAKERS["int4"]] * 4, 32, 64, torch.float32)
    experts = kernels.ExpertWeights(matrices)
    x, logits = randn(3, 64), randn(3, 4)

    def run():
        ids, weights = kernels.route(logits, routing)
        rows = kernels.group_by_expert(ids, 4)
        return kernels.combine_experts(kernels.expert_matmul(x, experts, rows, of_tokens=True), weights, rows)

    graph = backend.graph()
    with workspace, workspace.recording(), graph.record():
        out = run()
    x.copy_(randn(3, 64, seed=5))
    logits.copy_(randn(3, 4, seed=6))
    graph.replay()
    assert torch.equal(out, run())


@pytest.mark.parametrize("expert", [-1, 4])
def test_experts_that_do_not_exist_are_refused(expert):
    ids = torch.tensor([[0, expert]], dtype=torch.int32)
    with pytest.raises(KernelError, match=rf"expert {expert} is not in \[0, 4\)"):
        kernels.group_by_expert(ids, 4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top_k": 0}, "0 experts for each token, which chooses from 8: there must be 1 to 8"),
        ({"top_k": 9}, "9 experts for each token, which chooses from 8: there must be 1 to 8"),
        ({"num_experts": 1025}, "1025 experts: there must be 1 to 1024"),
        ({"num_experts": 0}, "0 experts: there must be 1 to 1024"),
        ({"num_groups": 3}, "1 of 3 groups of 8 experts: groups must have the same size"),
        ({"num_groups": 0}, "1 of 0 groups of 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, "5 of 4 groups of 8 experts"),
        ({"num_groups": 8, "top_groups": 2, "top_k": 3}, "3 experts for each token, which chooses from 2"),
        ({"scoring": "hash"}, "scoring 'hash': it must be one of softmax, sigmoid, sparsemixer"),
        ({"num_groups": 8, "top_groups": 8, "has_pairs": True}, "8 groups of one expert"),
    ],
)
def test_routings_that_make_no_sense_are_refused_with_their_numbers(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said) as caught:
        Routing(**({"top_k": 2, "num_experts": 8} | wrong))
    assert "Routing(" not in str(caught.value)


def test_arguments_that_do_not_fit_are_refused():
    logits, routing = torch.zeros(2, 4), Routing(2, 4)
    ids, weights = kernels.route(logits, routing)
    for wrong, bias in ((logits[:, :3], None), (logits.double(), None), (logits.T, None), (logits, torch.zeros(3))):
        with pytest.raises(KernelError, match="route takes"):
            kernels.route(wrong, routing, bias)
    with pytest.raises(KernelError, match="route takes"):
        kernels.route(logits, Routing(2, 4, "sparsemixer"), torch.zeros(4))
    with pytest.raises(KernelError, match="route takes"):
        kernels.route(logits, routing, torch.zeros(4, device="meta"))
    for wrong, count in ((ids.long(), 4), (ids[0], 4), (ids.T, 4), (ids[:, :0], 4), (ids, 0), (ids, -1), (ids, 2**31)):
        with pytest.raises(KernelError, match="group_by_expert takes"):
            kernels.group_by_expert(wrong, count)
    rows = kernels.group_by_expert(ids, 4)
    matrices = mixed([packed] * 4, 8, 6, torch.float32)
    experts, x = kernels.ExpertWeights(matrices), torch.zeros(2, 6)
    for wrong in (x[:, :5], x.bfloat16(), torch.zeros(4, 6), torch.zeros(6, 2).T):
        with pytest.raises(KernelError, match="expert_matmul takes"):
            kernels.expert_matmul(wrong, experts, rows, of_tokens=True)
    with pytest.raises(KernelError, match="expert_matmul takes"):
        kernels.expert_matmul(x, kernels.ExpertWeights(matrices[:3]), rows, of_tokens=True)
    elsewhere = replace(rows, pairs=rows.pairs.to("meta"), places=rows.places.to("meta"))
    with pytest.raises(KernelError, match="expert_matmul takes"):
        kernels.expert_matmul(x, experts, elsewhere, of_tokens=True)
    with pytest.raises(KernelError, match="combine_experts takes"):
        kernels.combine_experts(torch.zeros(4, 8), weights, elsewhere)
    y = torch.zeros(4, 8)
    for first, *others in (
        (y[:3], weights),
        (y, weights[:1]),
        (y.half(), weights),
        (y, weights, x),
        (y, weights, None, x),
        (y, weights, torch.zeros(2, 8, device="meta")),
    ):
        with pytest.raises(KernelError, match="combine_experts takes"):
            kernels.combine_experts(first, others[0], rows, *others[1:])
    for wrong in ([*matrices, packed(7, 6, torch.float32, 0)], [*matrices, packed(8, 6, torch.bfloat16, 0)]):
        with pytest.raises(KernelError, match="ExpertWeights takes"):
            kernels.ExpertWeights(wrong)
    biases = [torch.zeros(8)] * 3
    for wrong in (torch.zeros(7), torch.zeros(8).bfloat16(), torch.zeros(8, device="meta"), torch.zeros(16)[::2]):
        with pytest.raises(KernelError, match=r"ExpertWeights takes 4 contiguous float32 biases \[8\]"):
            kernels.ExpertWeights(matrices, [*biases, wrong])
    for few_or_many in (biases, biases[:1], [], biases + biases):
        with pytest.raises(KernelError, match="ExpertWeights takes 4 "):
            kernels.ExpertWeights(matrices, few_or_many)
    with pytest.raises(KernelError, match="at least one"):
        kernels.ExpertWeights([])
