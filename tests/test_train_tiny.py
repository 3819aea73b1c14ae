"""The training recipe: its data, and a run of a few seconds that has to learn something."""

import importlib.util
import json
import random
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "tools" / "train_tiny"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_tiny_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data() -> ModuleType:
    return load_script("data")


@pytest.fixture(scope="module")
def train() -> ModuleType:
    return load_script("train")


def test_summary_is_the_first_paragraph_that_says_something(data: ModuleType) -> None:
    def plain() -> None:
        """Serialize an object
        to a string.

        More words."""

    def signature_first() -> None:
        """f(x) -> y

        Serialize an object to a string."""

    def short() -> None:
        """Too short."""

    assert data.summary(plain) == "Serialize an object to a string."
    assert data.summary(signature_first) == "Serialize an object to a string."
    assert data.summary(short) is None


def test_summaries_cover_members_and_leave_out_what_was_imported(data: ModuleType) -> None:
    found = data.module_summaries(json, "json")
    assert found["json.JSONEncoder.default"].startswith("Implement this method in a subclass")
    assert "json.dumps" in found
    assert not any(name.startswith("json.codecs") for name in found)


def test_source_skips_tests_and_foreign_packages(data: ModuleType, tmp_path: Path) -> None:
    for folder in ("pkg", "pkg/tests", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text(f"# {folder}\n" + "x = 1\n" * 100)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 100)
    assert [text.splitlines()[0] for text in data.library_source(tmp_path)] == ["# pkg"]


def test_equal_seeds_draw_equal_batches_of_dialogs_and_source(train: ModuleType) -> None:
    source, summaries = ["def add(a, b):\n    return a + b\n" * 40], {"add": "Return the sum of a and b."}
    tokenizer = train.train_tokenizer(source, summaries, vocab_size=300)
    recipe = train.Recipe(chat_share=0.5, seq_len=32, batch_size=4)
    first, second = (train.Batches(source, summaries, tokenizer, recipe).draw() for _ in range(2))
    assert first.shape == (4, 33)
    assert first.equal(second)
    assert "return a + b" in tokenizer.decode(first[3].tolist())
    assert "Return the sum of a and b." in train.dialog(list(summaries.items()), random.Random(0))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in PEFT
def test_a_few_steps_write_adapters_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire import LLM, LoRARequest
    from tools.train_tiny import adapters

    summaries = {"add": "Return the sum of a and b."}
    (tmp_path / "data.json").write_text(json.dumps({"summaries": summaries}))
    monkeypatch.setattr(adapters, "BATCH_SIZE", 2)
    monkeypatch.setattr(sys, "argv", ["adapters", str(tmp_path / "data.json"), str(tmp_path), "--steps", "26"])
    adapters.main()
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[1] < losses[0] * 0.7
    assert losses[3] < losses[2] * 0.7
    llm = LLM(enable_lora=True, num_gpu_blocks_override=32)
    asked = [LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(adapters.MANNERS, start=1)]
    for of, manner in zip(asked, adapters.MANNERS.values(), strict=True):
        text = "".join(islice(adapters.dialogs(summaries, manner, random.Random(0)), 6))
        (plain,), (adapted,) = (llm.perplexity([text], use_tqdm=False, lora_request=lora) for lora in (None, of))
        assert adapted < plain / 2


def test_a_few_steps_write_an_eagle_head_whose_drafts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire import LLM, SamplingParams
    from tools.train_tiny import eagle

    summary = "Return the sum of a and b, or of all their elements if both are sequences of numbers."
    toy = {"source": ["x = 1\ny = 2\nz = x + y\n" * 60], "summaries": {"add": summary}}
    (tmp_path / "data.json").write_text(json.dumps(toy))
    monkeypatch.setattr(eagle, "RECIPE", eagle.Recipe(lr=2e-2, chat_share=1.0, seq_len=48, batch_size=2))
    monkeypatch.setattr(sys, "argv", ["eagle", str(tmp_path / "data.json"), str(tmp_path), "--steps", "60"])
    eagle.main()
    losses = [float(line.split()[3].rstrip(",")) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] * 0.7
    llm = LLM(speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2, "adaptive": False})
    prompt = f"<|im_start|>user\nWhat does add do?<|im_end|>\n<|im_start|>assistant\n{summary[:30]}"
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    stats = llm.engine.scheduler.drafting.stats["model"]
    assert stats.num_accepted > 0


def test_a_short_run_learns_and_writes_a_loadable_checkpoint(train: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy = {"source": ["x = 1\ny = 2\nz = x + y\n" * 60], "summaries": {"add": "Return the sum of a and b."}}
    (tmp_path / "data.json").write_text(json.dumps(toy))
    out = tmp_path / "out"
    size = ["--batch-size", "4", "--seq-len", "32", "--vocab-size", "300", "--lr", "1e-2"]
    train.main([str(tmp_path / "data.json"), str(out), "--shape", "32,1,2,1,64", "--steps", "60", *size])

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is add?"}], tokenize=False)
    assert chat == "<|im_start|>user\nWhat is add?<|im_end|>\n"
    ids = tokenizer("x = 1\ny = 2\nz = x + y\n" * 4, return_tensors="pt").input_ids
    untrained_loss = 5.7  # ln(300)
    assert model(input_ids=ids, labels=ids).loss.item() < untrained_loss - 2
    assert model.generation_config.eos_token_id == [2, 0]
