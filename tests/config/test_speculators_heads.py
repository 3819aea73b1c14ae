"""Which model a folder in the `speculators` format drafts for."""

from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError
from quire.config.checkpoint.draft_heads import verifier_of

from .test_draft_heads import FUSED, write

SPECULATORS = {"speculators_model_type": "eagle3"}


@pytest.mark.parametrize(
    ("proposals", "more"),
    [
        (None, {}),
        ([], {}),
        ({}, {}),
        ([1], {}),
        ([{}], {}),
        ([{"speculative_tokens": 4}, {"speculative_tokens": 5}], {"num_speculative_tokens": 4}),
    ],
)
def test_the_model_that_a_head_drafts_for(proposals: Any, more: dict[str, Any], tmp_path: Path) -> None:
    section = {"verifier": {"name_or_path": "org/model"}, "proposal_methods": proposals}
    name = str(write(tmp_path / "head", FUSED, speculators_config=section, **SPECULATORS))
    assert verifier_of(name) == ("org/model", {"method": "eagle3", "model": name, **more})


@pytest.mark.parametrize("section", [{}, {"verifier": {}}, {"verifier": {"name_or_path": ""}}])
def test_a_head_that_does_not_say_its_model(section: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "head", FUSED, speculators_config=section, **SPECULATORS)
    message = (
        f"^{folder}/config.json does not say which model it drafts for; give that as the model, and {folder} as the"
    )
    with pytest.raises(CheckpointError, match=message):
        verifier_of(str(folder))


def test_other_checkpoints_draft_for_no_model(tmp_path: Path) -> None:
    assert verifier_of(str(write(tmp_path / "head", FUSED))) is None
    (tmp_path / "m.gguf").touch()
    assert verifier_of(str(tmp_path / "m.gguf")) is None
