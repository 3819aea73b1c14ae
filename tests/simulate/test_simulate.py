"""The simulator: replayable, and the same outputs under every schedule."""

import json
from itertools import pairwise

import pytest

from quire.cli import main
from quire.interfaces.simulate.beams import BeamChurn
from quire.interfaces.simulate.report import report
from quire.interfaces.simulate.simulator import Simulator
from quire.interfaces.simulate.trace import TraceRequest
from quire.interfaces.simulate.workloads import chat_trace, synthetic_trace, tenants_trace

from .helpers import alone, make, simulate

SHAPES = [
    {"shape": "mixed"},
    {"shape": "chat", "num_requests": 16, "requests_per_s": 50.0},
    {"shape": "tenants"},
    {"shape": "alpaca", "n": 3},
    {"shape": "alpaca", "beam_width": 4},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_every_schedule_gives_the_same_outputs(shape):
    options = {"num_requests": 40, "requests_per_s": 20.0, **shape}

    def trace():
        return synthetic_trace(5, **options)

    roomy = simulate(trace(), caching=False)
    assert (roomy["requests"], sum(roomy["preemptions"].values())) == (options["num_requests"], 0)
    tight = {
        "cached": {"num_blocks": 160},
        "chunked": {"num_blocks": 160, "caching": False, "tokens": 70},
        "swapped": {"num_blocks": 160, "num_host_blocks": 800, "preemption_mode": "swap"},
        "priority": {"num_blocks": 160, "policy": "priority"},
        "fair": {"num_blocks": 160, "policy": "fair"},
        "prefix": {"num_blocks": 160, "policy": "prefix"},
        "drafting": {"num_blocks": 160, "acceptance": 0.6},
    }
    for limits in tight.values():
        assert simulate(trace(), **limits)["outputs_digest"] == roomy["outputs_digest"]


def test_pressure_preempts_by_the_method_asked_for():
    def figures(**options):
        return simulate(synthetic_trace(5, 60, requests_per_s=20.0), num_blocks=130, **options)

    recomputed, swapped = figures(), figures(num_host_blocks=400, preemption_mode="swap")
    assert recomputed["preemptions"]["recompute"] > 0 == recomputed["preemptions"]["swap"]
    assert recomputed["swapped_out_blocks"] == recomputed["swapped_in_blocks"] == 0
    assert swapped["preemptions"]["swap"] > 0
    assert swapped["swapped_out_blocks"] >= swapped["swapped_in_blocks"] > 0


def test_right_drafts_cut_the_steps_and_wrong_ones_change_nothing():
    def figures(**options):
        return simulate(synthetic_trace(5, num_requests=30, requests_per_s=2.0), **options)

    plain, wrong, some, right = figures(), *(figures(acceptance=share) for share in (0.0, 0.7, 1.0))
    assert wrong == plain
    assert len({each["outputs_digest"] for each in (plain, some, right)}) == 1
    assert right["steps"] < 0.6 * plain["steps"]
    assert right["steps"] < some["steps"] < plain["steps"]
    assert right["accepted_tokens"] == right["drafted_tokens"] > plain["output_tokens"] / 2
    assert 0.4 < some["accepted_tokens"] / some["drafted_tokens"] < 0.7, "none counts after the first wrong one"
    assert right["simulated_s"] < plain["simulated_s"]
    longer = figures(acceptance=1.0, draft_length=12)
    assert longer["steps"] < right["steps"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--acceptance", "1.5"], "--acceptance"), (["--acceptance", "nan"], "--acceptance"),
     (["--draft-length", "0"], "--draft-length"), (["--draft-length", "33"], "--draft-length")],
)  # fmt: skip
def test_drafts_that_cannot_be_are_refused(arguments, name, capsys):
    assert main(["simulate", *arguments]) == 2
    assert f"{name} {arguments[1]}: must be from" in capsys.readouterr().err


def test_a_length_of_drafts_needs_an_acceptance(capsys):
    assert main(["simulate", "--draft-length", "6"]) == 2
    assert "--draft-length 6: without --acceptance nothing is drafted" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--shape", "chat"], ["--beam-width", "3"], ["--acceptance", "0.5"]])
def test_one_seed_is_one_run_to_the_byte(arguments, capsys):
    printed = []
    for seed in (1, 1, 2):
        assert main(["simulate", "--seed", str(seed), "--requests", "40", "--json", *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert json.loads(printed[0])["requests"] == 40


def test_waste_is_small_and_shared_prefixes_hit():
    figures = simulate(synthetic_trace(3, 300))
    assert 0 < figures["kv_waste"] < 0.06
    assert figures["prefix_hit_rate"] > 0.15


def test_waste_is_the_share_of_slots_left_empty():
    figures = simulate([TraceRequest(0, 17, 1)])  # 17 tokens in 2 blocks of 16, in the one step there is
    assert figures["kv_waste"] == 0.0  # nothing is held after it
    figures = simulate([TraceRequest(0, 17, 2)])
    assert figures["kv_waste"] == round(15 / 32, 4)


def test_a_trace_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": i, "prompt_len": 40, "output_len": 3, "prefix_group": 1, "prefix_len": 32} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert main(["simulate", "--trace", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "prefix_hit_rate      0.6564" in printed  # four of five find 32 of the 39 tokens looked up
    assert "possible_hit_tokens  128\nhit_of_possible      1.0\n" in printed
    assert "tenant 'default': requests 5" in printed


def test_a_request_that_never_fits_is_counted_and_the_others_run():
    trace = [TraceRequest(0.0, 100, 3), TraceRequest(0.0, 10_000, 3, session=1), TraceRequest(1.0, 100, 3, session=1)]
    figures = simulate(trace, num_blocks=20)
    assert (figures["requests"], figures["ignored"]) == (2, 1)


def test_a_turn_follows_the_end_of_the_one_before_it_and_holds_the_conversation():
    prompts = {}

    class Watched(Simulator):
        def _finish(self, group):
            prompts[int(group.request_id)] = (group.metrics, group.seqs[0].token_ids)
            super()._finish(group)

    first, second, third = (
        TraceRequest(0.0, 40, 30, 1, 20, session=7),
        TraceRequest(0.0, 10, 5, session=7, think_s=2.0),
        TraceRequest(60.0, 10, 5, session=7, think_s=2.0),
    )
    simulate([first, second, third], kind=Watched)
    (ended, conversation), (metrics, longer), (late, longest) = (prompts[index] for index in range(3))
    assert conversation[:40] == first.prompt_token_ids(0)
    assert metrics.arrival_time == pytest.approx(ended.finished_time + 2.0)
    assert longer[:70] == conversation
    assert longer[70:80] == second.prompt_token_ids(1)
    assert late.arrival_time == 60.0
    assert longest[:85] == longer


def test_all_that_is_known_of_a_chat_is_found_again():
    figures = simulate(chat_trace(1, users=6, turns=4, system_len=200, users_per_s=0.2))
    assert figures["requests"] == 24
    assert figures["hit_of_possible"] > 0.99
    assert figures["sharing_savings"] > 0
    assert simulate(chat_trace(1, users=6, turns=4), caching=False)["hit_of_possible"] == 0.0
    evicting = simulate(chat_trace(1, users=6, turns=4, system_len=200, users_per_s=50), num_blocks=50)
    assert evicting["hit_of_possible"] < 0.99


def test_samples_differ_and_share_their_prompt():
    simulator = make()
    outputs = []
    finish = simulator._finish

    def watch(group):
        outputs.extend(seq.token_ids[seq.num_prompt_tokens :] for seq in group.seqs)
        finish(group)

    simulator._finish = watch
    simulator.run([TraceRequest(0.0, 160, 20, n=5)])
    assert len(outputs) == 5 == len({output[0] for output in outputs})
    assert {len(output) for output in outputs} == {20}
    figures = simulate([TraceRequest(0.0, 160, 20, n=5)])
    assert figures["output_tokens"] == 100
    # ten shared blocks, then one or two of each sample's own: 60 entries in 20 blocks at the peak
    assert 0.5 < figures["sharing_savings"] < figures["peak_sharing_savings"] <= 0.8


def test_beams_share_more_than_samples_and_more_churn_shares_more():
    def savings(**options):
        churn = options.pop("churn", None)
        trace = [TraceRequest(10.0 * i, 32, 60, **options) for i in range(5)]
        return simulate(trace, churn=churn)["sharing_savings"]

    samples, beams, churning = savings(n=4), savings(beam_width=4), savings(beam_width=4, churn=BeamChurn(0.5))
    assert samples < beams < churning
    assert savings(beam_width=4, churn=BeamChurn(0.0)) == pytest.approx(samples, abs=1e-3)


def test_tenants_are_distinguished():
    figures = simulate(tenants_trace(0, 200), seqs=20)
    tenants = figures["tenants"]
    assert list(tenants) == ["flood", "steady-1", "steady-2"]
    assert sum(tenant["requests"] for tenant in tenants.values()) == 200
    assert sum(tenant["contended_share"] for tenant in tenants.values()) == pytest.approx(1, abs=1e-3)
    fair = simulate(tenants_trace(0, 200), seqs=20, policy="fair")
    assert fair["outputs_digest"] == figures["outputs_digest"]
    steady, before = fair["tenants"]["steady-1"], tenants["steady-1"]
    assert steady["tokens"] == before["tokens"]
    assert steady["first_token_s"]["p99"] < before["first_token_s"]["p99"]
    assert steady["contended_share"] > before["contended_share"]


def test_one_tenant_alone_is_never_contended():
    assert simulate(synthetic_trace(0, 50), seqs=2)["tenants"]["default"]["contended_share"] == 0.0


def test_the_record_stays_small_however_long_the_run():
    simulator = make(kind=Simulator)
    record = simulator.run([TraceRequest(0.0, 10, 6000)])
    assert len(record.moments) <= 4096
    assert record.steps_per_moment == 2
    times = [moment.time_s for moment in record.moments]
    assert times == sorted(times)


def test_requests_alone_give_the_same_outputs():
    trace = list(synthetic_trace(9, 20))
    assert simulate(trace)["outputs_digest"] == simulate(alone(trace))["outputs_digest"]


@pytest.mark.parametrize("wide", [{"n": 5}, {"beam_width": 5}])
def test_more_sequences_than_run_at_once_are_refused_alone(wide):
    figures = simulate([TraceRequest(0.0, 10, 5, **wide), TraceRequest(0.0, 10, 5, n=4)], seqs=4)
    assert (figures["requests"], figures["ignored"], figures["output_tokens"]) == (1, 1, 20)


def test_samples_and_beams_that_have_no_room_together_take_turns():
    trace = [TraceRequest(0.0, 8, 24, n=3), TraceRequest(0.0, 8, 24, beam_width=3)]
    figures = simulate(trace, num_blocks=10, block_size=4)
    assert (figures["requests"], figures["ignored"]) == (2, 0)
    assert figures["preemptions"]["recompute"] > 0
    assert figures["outputs_digest"] == simulate(trace)["outputs_digest"]


def test_a_latency_target_shortens_the_gaps_between_tokens():
    trace = [TraceRequest(0.0, 10, 400), *(TraceRequest(0.5 * i, 1500, 2) for i in range(1, 16))]
    num_long, digests = [], set()
    for target in (None, 60.0):
        simulator = make(target_step_ms=target)
        times = [moment.time_s for moment in simulator.run(trace).moments]
        num_long.append(sum(later - earlier > 0.3 for earlier, later in pairwise(times)))
        digests.add(report(simulator)["outputs_digest"])
    assert num_long[1] < num_long[0] / 2  # not none: how long a step takes is learned from steps
    assert len(digests) == 1


def test_drafts_beside_prompts_must_be_worth_what_a_token_costs_without_them():
    """Beside a prompt every draft is cheap, but it takes the time that the next step of decodes would need."""
    plain, drafted = (simulate(synthetic_trace(0, 100, requests_per_s=8.0), acceptance=a) for a in (None, 0.7))
    assert drafted["first_token_s"]["p50"] < 1.3 * plain["first_token_s"]["p50"]
    assert drafted["drafted_tokens"] > 100
