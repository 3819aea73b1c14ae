"""The benchmark harness, with engines of a few lines: who is asked when, what is left out, what the report shows."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import scaling
from benchmarks.__main__ import main
from benchmarks.checkpoints.dense import ensure_checkpoint, random_weights
from benchmarks.checkpoints.derived import ensure_adapters, ensure_packed
from benchmarks.checkpoints.mixture import MixtureShape, ensure_mixture
from benchmarks.drivers.convert_to_gguf import gguf_name
from benchmarks.drivers.protocol import random_prompts
from benchmarks.drivers.quire_engine import kernel_times
from benchmarks.engines import interleaved, peers
from benchmarks.engines.interleaved import Run
from benchmarks.engines.peers import PRECISIONS, Engine, LeftOutError
from benchmarks.engines.session import Session
from benchmarks.figures import FIGURES
from benchmarks.report import write_report
from quire import LLM, SamplingParams, kernels
from quire.config.model import ModelConfig
from quire.models.adapters.peft import read_adapter
from quire.models.weights.loader import load_model
from tests.benchmark_rows import ROWS

DRIVER = """
import sys
from benchmarks.drivers.protocol import serve
def generate(**case):
    if sys.argv[2] == "crashing":
        sys.exit(1)
    with open(sys.argv[1], "a") as file:
        print(sys.argv[2], case["num_prompts"], case["output_len"], file=file)
    return {"elapsed_s": 0.5 if sys.argv[2] == "fast" else 1.0}
def limits(precision):
    return {"read_bytes_per_s": 1e9, "flops_per_s": 1e12}
def load():
    if sys.argv[2] == "broken":
        raise ValueError("no such precision")
    print("noise that belongs to nobody")
    return {"generate": generate, "limits": limits}
serve(load)
"""


class Scripted(Engine):
    """Writes down when it is asked."""

    environment = module = ""

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def install(self) -> None: ...

    def _install(self) -> None: ...

    def command(self, checkpoint: Path, max_model_len: int) -> list[str]:
        return [str(self.python), "-c", DRIVER, str(self.folder / "asked"), self.name]

    def variables(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(interleaved.ROOT)}


class Fast(Scripted):
    name = "fast"


class Slow(Scripted):
    name = "slow"


class Broken(Scripted):
    name = "broken"


class Crashing(Scripted):
    name = "crashing"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, tmp_path / "none", quick=True, engines=frozenset(["fast", "slow", "broken", "crashing"]))


def test_engines_run_in_turn_and_one_that_fails_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "Quire", Fast)
    engines = [Fast(run.folder), Crashing(run.folder), Slow(run.folder), Broken(run.folder)]
    cases = [{"num_prompts": n, "input_len": 4, "output_len": 9} for n in (1, 3)]
    rows = list(interleaved.interleaved(run, engines, interleaved.TINY, cases, 100))
    assert (run.folder / "asked").read_text().splitlines() == [
        f"{engine} {n} {output_len}"
        for n in (1, 3)
        for output_len in (4, *[9] * run.rounds)
        for engine in ("fast", "slow")
    ]
    left_out = {row["engine"]: row["left_out"] for row in rows if "left_out" in row}
    assert left_out.keys() == {"broken", "crashing"}
    assert left_out["broken"] == "ValueError: no such precision"
    assert "the driver ended" in left_out["crashing"]
    speedups = [row["quire_speedup"] for row in rows if row["engine"] == "slow" and "elapsed_s" in row]
    assert speedups == [2.0, 2.0]
    assert [row["output_tokens_per_s"] for row in rows if row.get("num_prompts") == 3] == [54.0, 27.0]


def test_short_cases_have_more_rounds_and_long_ones_two(run: Run) -> None:
    def rounds(run: Run, seconds: float) -> int:
        return next(done for done in range(100) if not run.wants_another_round(done, done * seconds))

    assert [rounds(run, seconds) for seconds in (0.1, 20, 100)] == [2, 2, 2]
    long = dataclasses.replace(run, quick=False)
    assert [rounds(long, seconds) for seconds in (0.1, 5, 10, 16, 25, 31, 100)] == [9, 9, 5, 3, 3, 2, 2]


def test_vllm_is_left_out_where_it_would_be_slower_than_its_users_have_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_library", lambda _: None)
    with pytest.raises(LeftOutError, match="libtcmalloc-minimal4"):
        peers.Vllm(run.folder).variables()


def test_a_driver_that_cannot_start_says_where_its_last_words_are(run: Run) -> None:
    engine = Fast(run.folder)
    session = Session(engine, interleaved.TINY, 100)
    try:
        with pytest.raises(LeftOutError, match=r"the driver ended; see .*fast bfloat16\.log"):
            session.call("no such thing")
    finally:
        session.close()
    assert "no such thing" in (run.folder / "logs" / "fast bfloat16.log").read_text()


def test_threads_are_measured_in_turn_up_to_twice_the_machine_s(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, int]]()

    class Timed:
        def __init__(self, engine: Engine, checkpoint: Path, max_model_len: int) -> None:
            (self.count,) = engine.arguments.values()  # type: ignore[attr-defined]
            assert engine.name == f"quire-{self.count}-threads"

        def call(self, op: str, output_len: int, **each: int) -> dict[str, float]:
            asked.append((self.count, output_len))
            return {"elapsed_s": 2 / self.count}

        def close(self) -> None: ...

    for name, value in {"Session": Timed, "num_threads": lambda: 3, "ensure_checkpoint": lambda path: path}.items():
        monkeypatch.setattr(scaling, name, value)
    rows = list(scaling.scaling(run))
    assert [row["threads"] for row in rows if row.get("region_us", 0) > 0] == [1, 2, 3, 6]
    found = [row for row in rows if "speedup" in row]
    assert len(found) == 2 * 3 * 4
    assert [(row["threads"], row["speedup"]) for row in found[:4]] == [(1, 1.0), (2, 2.0), (3, 3.0), (6, 6.0)]
    assert found[5]["tokens_per_s"] == 8 * 32 * 2 / 2
    assert asked[:8] == [(count, output_len) for output_len in (4, 32) for count in (1, 2, 3, 6)]
    assert [scaling.thread_counts(most) for most in (1, 2, 8)] == [[1, 2], [1, 2, 4], [1, 2, 4, 8, 16]]


def test_kernels_are_timed_while_they_run_and_no_product_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()

    def counting(name: str) -> Any:
        kernel = getattr(kernels, name)

        def call(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            time.sleep(0.001)
            return kernel(*arguments, **named)

        return call

    def recorded(*_: object) -> Any:
        raise AssertionError("kernels of a recorded step run when it is replayed")

    products = ("matmul", "activated_matmul")
    llm = LLM(interleaved.TINY, quantization="int8", max_model_len=64, num_gpu_blocks_override=32)
    for name in products:
        monkeypatch.setattr(kernels, name, counting(name))
    monkeypatch.setattr(kernels.KernelGraph, "record", recorded)
    params = SamplingParams(max_tokens=2, temperature=0)
    found = kernel_times(lambda: llm.generate([{"prompt_token_ids": list(range(40))}], params, use_tqdm=False))
    assert set(called) == set(products)
    assert found["products_s"] >= 0.001 * len(called)
    assert found["attention_s"] > 0
    assert found["others_s"] > 0


def test_prompts_are_the_same_for_every_engine() -> None:
    assert random_prompts(3, 10) == random_prompts(3, 10)
    assert {len(prompt) for prompt in random_prompts(3, 10)} == {10}


def test_every_weight_has_a_place_in_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"VOCAB": 32, "HIDDEN": 28, "INTERMEDIATE": 16, "LAYERS": 2}
    for name, value in small.items():
        monkeypatch.setattr(f"benchmarks.checkpoints.dense.{name}", value)
    names = [gguf_name(name) for name in random_weights()]
    assert len(set(names)) == len(names) == 2 + 2 * 12
    assert "blk.1.attn_q.bias" in names


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert ensure_checkpoint(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_mixture_is_written_as_gguf_and_its_tokens_go_to_different_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = {letter: i for i, letter in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    monkeypatch.setattr("benchmarks.checkpoints.mixture.train_tokenizer", lambda: tokenizer)
    sizes = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "expert_width": 32, "num_experts": 16}
    path = ensure_mixture(tmp_path / "mixture.gguf", MixtureShape(num_layers=2, vocab=512, top_k=2, **sizes))
    assert ensure_mixture(path, MixtureShape()) == path, "it is there"
    seen = set[int]()
    route = kernels.route

    def spy(logits: torch.Tensor, routing: kernels.Routing, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert routing == kernels.Routing(2, 16, is_normalized=True)
        ids, weights = route(logits, routing, bias)
        seen.add(len(ids.unique()))
        return ids, weights

    llm = LLM(path, max_model_len=64, num_gpu_blocks_override=32)
    monkeypatch.setattr(kernels, "route", spy)
    monkeypatch.setattr("quire.runner.model_runner._RECORDED_WORK", math.inf)  # it looks at what has been computed
    monkeypatch.setattr("quire.runner.decode_graphs.DecodeGraphs.can_replay", lambda *_: False)
    llm.generate([list(range(20, 60))], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert max(seen) >= 12


def small_checkpoint(folder: Path) -> Path:
    """A Qwen2 whose matrices fill groups of 128."""
    tensors = {"model.embed_tokens.weight": torch.zeros(64, 128), "model.norm.weight": torch.ones(128)}
    shapes = {f"self_attn.{name}_proj": (128 if name in "qo" else 64, 128) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (128, 128), "mlp.up_proj": (128, 128), "mlp.down_proj": (128, 128)}
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = torch.zeros(shape)
    tensors |= {f"model.layers.0.self_attn.{name}_proj.bias": torch.zeros(128 if name == "q" else 64) for name in "qkv"}
    tensors |= {f"model.layers.0.{name}_layernorm.weight": torch.ones(128) for name in ("input", "post_attention")}
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "vocab_size": 64}
    config |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}
    folder.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_packed_checkpoints_and_adapters_load(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "dense")
    for method in ("awq", "gptq"):
        packed = ensure_packed(checkpoint, tmp_path / method, method)
        assert ensure_packed(tmp_path / "none", packed, method) == packed, "it is there"
        config = ModelConfig.resolve(packed)
        weight = load_model(config).get_submodule("layers.0.mlp.down_proj").weight
        assert weight.format == ("u4_half_zeros" if method == "awq" else "u4_half")
    folders = ensure_adapters(checkpoint, tmp_path / "adapters")
    assert ensure_adapters(tmp_path / "none", tmp_path / "adapters") == folders
    model = load_model(ModelConfig.resolve(checkpoint))
    adapters = [read_adapter(folder, model, 16) for folder in folders]
    assert [len(adapter.modules) for adapter in adapters] == [7] * 8


def test_the_report_shows_the_rows_and_nothing_it_has_not(tmp_path: Path) -> None:
    results, out = tmp_path / "results.jsonl", tmp_path / "page.md"
    lines = [json.dumps({"figure": name} | row) for name, rows in ROWS.items() for row in rows]
    results.write_text("\n".join(lines))
    write_report(results, out)
    text = out.read_text()
    assert "| 8 x 128 / 64 | other | 77.5 | 8.0 | 1.73 | 0.53 | 9.0 s |" in text
    assert "| 8 x 128 / 1 | quire | 99.5 | 8.0 |  | 0.53 | 1.0 s |" in text
    assert "third is left out: it is not here" in text
    assert "| quire | int8 | 300.5 | 0.50 | 0.50 | 1.5 s |" in text
    assert "Started 3 times, Quire in int8 is ready, with imports, after 1.25 s (the median)" in text
    assert "| embeddings, int8: ready, with imports: seconds | 1.0 | 1.25 | missed |" in text
    assert "- embeddings, int8: ready, with imports: seconds: importing torch alone takes 1.00 s.\n" in text
    assert "| quire | 129 | 6.5 | 0.71 |" in text
    assert "llama.cpp is left out: no compiler" in text
    assert "### GGUF Q8_0\n" in text
    assert "| 1 x 128 / 64 | quire-gguf | 64.0 | 64.0 |  | 0.66 | 1.5 s |" in text
    assert "| 8 | 8 | quire | 18.3 % |" in text
    assert "| bfloat16, 8 concurrent: share of the limit | 0.9 | 0.53 | missed |" in text
    assert (
        "\n- bfloat16, 8 concurrent: share of the limit: a step takes 60.5 ms, of which products take 50.2 (at 0.93 of "
        "the limit); the limit does not count attention (4.0), other kernels (2.2) and the rest (4.0).\n"
    ) in text
    assert "| bfloat16 | 8 x 1 | 60.5 | 50.25 | 0.93 | 4.0 | 2.25 | 4.00 |" in text
    assert "(4 times), the cost grows 2.0 times: linear or better" in text
    assert "(4 times), the cost grows 16.0 times: more than linear" in text
    assert "| avx2 | int8 | 8 | 64 | 32 | 9.5 | 1.5 | 2.5 | reading | 0.71 |" in text
    assert "| int8 | 8 x 128 / 32 | 100.5 (0.95) | 201.0 (1.90) |\n| a region, us |  | 1.5 | 3.0 |" in text
    assert "### AVX2, int8\n" in text
    assert "| 1 x 128 / 64 | llama.cpp-avx2 | 64.0 | 64.0 | 1.50 |  | 1.2 s |" in text
    assert "## Kernels" not in text
    plots = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    assert set(plots) == {"throughput.svg", "growth-batch.svg", "growth-context.svg", "growth-waiting.svg"}
    assert all(f"page/{name}" in text for name in plots)
    write_report(results, out)
    assert {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()} == plots
    assert out.read_text() == text


def test_measuring_again_replaces_a_figure_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    values = iter([1, 2, 3])
    monkeypatch.setitem(FIGURES, "ready", lambda run: iter([{"value": next(values)}]))
    monkeypatch.setitem(FIGURES, "latency", lambda run: iter([{"value": next(values)}]))
    for figure in ("ready", "latency", "ready"):
        main([figure, "--folder", str(tmp_path)])
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert found == [{"figure": "latency", "value": 2}, {"figure": "ready", "value": 3}]
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"figure": "ready", "value": 1}


def test_quire_comes_first_wherever_engines_are_compared() -> None:
    assert all(engines[0].name == "quire" for engines in PRECISIONS.values())
