"""The examples of docs/clients.md that are Python or short; commands that run longer have tests of their own."""

import pytest

from tests.clients.documented import examples, for_server, run_command
from tests.clients.served import Served

EXPECTED = {
    "OpenAI's SDK": ["Serialize", "<class '__main__.Entry'>"],
    "OpenAI's Agents SDK": ["Serialize"],
    "Anthropic's SDK": [""],
    "Ollama's client": ["Serialize"],
    "LangChain": ["is_public="],
}


@pytest.mark.parametrize(
    ("section", "i"), [(section, i) for section, said in EXPECTED.items() for i in range(len(said))]
)
def test_a_python_example_runs(served: Served, section: str, i: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = examples(section, "python")
    assert len(found) == len(EXPECTED[section])
    exec(compile(for_server(found[i], served), f"docs/clients.md, {section}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip()
    assert EXPECTED[section][i] in printed
    for shown in examples(section, "text")[i : i + 1]:
        assert printed.strip() == shown.strip()


def test_the_curl_example_streams(served: Served) -> None:
    events = run_command("curl", served, {}).strip().split("\n\n")
    assert len(events) > 1
    assert events[-1] == "data: [DONE]"
