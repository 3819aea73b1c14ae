"""What can be replaced in an LLM: the contents of its cache while requests run, and its tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, RequestError, SamplingParams, TokenizerError


def test_running_requests_compute_their_tokens_again_after_a_reset() -> None:
    llm = LLM(max_model_len=128, num_gpu_blocks_override=16, swap_space=0.01, speculative_config={"method": "off"})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate([[7] * 40], params, use_tqdm=False)
    llm.engine.add_request("a", [7] * 40, params)
    for _ in range(3):
        llm.engine.step()
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert (llm.engine.stats().num_running, llm.engine.stats().num_cached_blocks) == (0, 0)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    assert outputs[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.engine.stats().num_preemptions == 1
    llm.engine.blocks.check_integrity()


def test_another_tokenizer_can_be_set(tmp_path: Path) -> None:
    llm = LLM(max_model_len=64, num_gpu_blocks_override=8)
    source = Path(llm.engine.tokenizer.source)
    shutil.copy(source / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].role }}: {{ messages[0].content }}!"})
    )
    llm.set_tokenizer(tmp_path)
    assert llm.get_tokenizer().name_or_path == str(tmp_path)
    (output,) = llm.chat([{"role": "developer", "content": "Once"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == "system: Once!"
    llm.engine.add_request("a", "Hi", SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="the tokenizer cannot be replaced while requests run"):
        llm.set_tokenizer(source)
    llm.engine.abort_request("a")
    known = json.loads((tmp_path / "tokenizer.json").read_text())
    last = max(known["model"]["vocab"].values())
    known["model"]["vocab"] |= {f"<extra {i}>": last + i for i in range(1, 600)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(TokenizerError, match=r"has \d+ tokens, and the model 8192"):
        llm.set_tokenizer(tmp_path)
