"""Where a GGUF checkpoint is found: a file, a folder, a hub id. (Other checkpoints: tests/models/test_loading.py.)"""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire.common.errors import CheckpointError, ConfigError
from quire.config.args import EngineArgs
from quire.config.checkpoint.location import Location, adapter_folder, is_downloadable
from quire.config.model import ModelConfig
from tests.config.gguf_file import model_bytes

HUB = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf")
HUB += ("mmproj-Q8_0.gguf", "README.md", "IQ2_M.gguf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A repository `org/tiny-GGUF` with the files of HUB; returns what each download brought."""
    downloads: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        if name != "org/tiny-GGUF":
            raise OSError("no such repository")
        allowed, ignored = options["allow_patterns"], options["ignore_patterns"]
        found = [file for file in HUB if any(fnmatch(file, each) for each in allowed)]
        downloads.append([file for file in found if not any(fnmatch(file, each) for each in ignored)])
        for file in downloads[-1]:
            (tmp_path / "cache" / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "cache" / file).write_bytes(model_bytes())
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: list(HUB))
    return downloads


def test_a_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.GGUF"
    path.write_bytes(model_bytes())
    config = ModelConfig.resolve(path)
    assert (config.model, config.path) == (str(path), path)
    assert Location(str(path), "m.GGUF").find() == path
    with pytest.raises(ConfigError, match=r"gguf_file='other': the model is the file '.*m\.GGUF' already"):
        ModelConfig.resolve(path, gguf_file="other")
    assert ModelConfig.resolve(None, tokenizer=path).tokenizer_path == path


@pytest.mark.parametrize("name", ["model.bin", "gone.gguf"])
def test_what_is_neither_a_folder_nor_a_gguf_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"is a file: give a \.gguf file|no folder or file '.*gone\.gguf'"):
        ModelConfig.resolve(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 5000, "File name too long"),
        ("org/" + "x" * 5000, "File name too long"),
        ("~a\0b", "embedded null byte"),
        ("~no-such-user/x", "Could not determine home directory."),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(name: str, reason: str) -> None:
    message = f"{re.escape(repr(name[:80]))} cannot be looked up as a file or folder: {reason}$"
    of_draft = {"speculative_config": {"model": name}}
    for start, given in (("", {"model": name}), ("", {"tokenizer": name}), ("speculative_config: ", of_draft)):
        with pytest.raises(CheckpointError, match=f"^{start}{message}"):
            EngineArgs(**given).resolve()
    assert not is_downloadable(name), "nor can the hub have it"


def test_a_folder_of_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny-Q8_0.gguf"
    path.write_bytes(model_bytes())
    assert Location(str(tmp_path)).find() == path
    (tmp_path / "config.json").write_text("{}")
    assert Location(str(tmp_path)).find() == path, "a config without weights is not a checkpoint"
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(model_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models \(there are tiny-Q4_0\.gguf, tiny-Q8_0\.gguf\)"):
        ModelConfig.resolve(tmp_path)
    assert EngineArgs(model=str(tmp_path), gguf_file="Q8_0").resolve().model.path == path
    (tmp_path / "model.safetensors").touch()
    assert Location(str(tmp_path)).find() == tmp_path, "safetensors come first"


def test_a_tokenizer_beside_gguf_files_is_used_if_it_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "tokenizer.json"):
        (tmp_path / name).touch()
    assert Location(str(tmp_path)).tokenizer() == tmp_path


@pytest.mark.parametrize(
    ("name", "gguf_file", "files"),
    [
        ("org/tiny-GGUF:Q4_K_M", None, [HUB[0]]),
        ("org/tiny-GGUF:q4_k_m", None, [HUB[0]]),
        ("org/tiny-GGUF", "tiny-Q8_0.gguf", [HUB[1]]),
        ("org/tiny-GGUF:Q8_0", None, [HUB[1]]),
        ("org/tiny-GGUF:BF16", None, list(HUB[2:4])),
        ("org/tiny-GGUF", "tiny-BF16-00001-of-00002.gguf", list(HUB[2:4])),
        ("org/tiny-GGUF:IQ2_M", None, [HUB[6]]),
    ],
)
def test_a_hub_id_downloads_the_files_of_one_model(
    hub: list[list[str]], tmp_path: Path, name: str, gguf_file: str | None, files: list[str]
) -> None:
    assert Location(name, gguf_file).find() == tmp_path / "cache" / files[0]
    assert hub == [files]


def test_a_model_of_the_hub_is_resolved_once(hub: list[list[str]], tmp_path: Path) -> None:
    config = ModelConfig.resolve("org/tiny-GGUF:Q8_0", tokenizer="org/tiny-GGUF:Q4_K_M")
    assert config.path == tmp_path / "cache" / HUB[1]
    assert config.tokenizer_path == tmp_path / "cache" / HUB[0]
    assert hub == [[HUB[1]], [HUB[0]]]


def test_a_hub_id_without_the_file_says_which_it_has(hub: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = r"it has tiny-Q4_K_M\.gguf, .*: name one, as in org/tiny-GGUF:Q4_K_M"
    with pytest.raises(CheckpointError, match=rf"has no GGUF file named 'Q3_K_S'; {listed}"):
        ModelConfig.resolve("org/tiny-GGUF:Q3_K_S")
    with pytest.raises(CheckpointError, match=rf"has no config\.json; {listed}"):
        ModelConfig.resolve("org/tiny-GGUF")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [f"{i}.gguf" for i in range(20)])
    with pytest.raises(CheckpointError, match=r"11\.gguf and others"):
        ModelConfig.resolve("org/tiny-GGUF")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [])
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        ModelConfig.resolve("org/tiny-GGUF")

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        ModelConfig.resolve("org/tiny-GGUF")
    with pytest.raises(CheckpointError, match="cannot be downloaded from the hub either: no such repository"):
        ModelConfig.resolve("org/unknown:Q8_0")


@pytest.mark.parametrize(
    ("files", "brought"),
    [
        (["tokenizer.json", "tekken.json", "tokenizer.model", "a.tiktoken", "merges.txt"], ["tokenizer.json"]),
        (["tekken.json", "tokenizer.model", "a.tiktoken", "merges.txt", "a.pkl"], None),
    ],
)
def test_other_vocabularies_are_downloaded_where_there_is_no_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], brought: list[str] | None
) -> None:
    def download(name: str, **options: Any) -> str:
        for file in [*files, "config.json", "model.safetensors"]:
            if any(fnmatch(file, each) for each in options["allow_patterns"]) and not any(
                fnmatch(file, each) for each in options["ignore_patterns"]
            ):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert Location("org/model").tokenizer() == tmp_path
    expected = {*(files[:-1] if brought is None else brought), "config.json"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    Location("org/model").complete(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == expected | {"model.safetensors"}
    (tmp_path / "modules.json").touch()
    assert Location("org/model").complete(tmp_path) == tmp_path


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What the hub is asked for; each download brings what is in the folder already."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, *, tqdm_class: type, **options: Any) -> str:
        assert isinstance(tqdm_class, type)
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


CONFIGS = ["*.json", "*.jinja"]
OTHERS = ["*/*", "consolidated*", "*.bin.index.json"]
VOCABULARIES = ["tekken.json", "*.model", "*.tiktoken", "*.txt"]


def asks(patterns: list[str], others: list[str]) -> tuple[str, dict[str, Any]]:
    options = {"revision": "v2", "cache_dir": "cache", "allow_patterns": patterns, "ignore_patterns": others}
    return "org/model", options


def test_what_the_hub_is_asked_for(tmp_path: Path, downloads: list[tuple[str, dict[str, Any]]]) -> None:
    location = Location("org/model", None, "v2", "cache")
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).touch()
    assert location.find() == tmp_path
    assert location.tokenizer() == tmp_path
    assert location.complete(tmp_path) == tmp_path
    (tmp_path / "modules.json").touch()
    assert location.complete(tmp_path) == tmp_path
    whole = asks([*CONFIGS, "*.safetensors", "model.safetensors.index.json"], OTHERS + VOCABULARIES)
    modules = asks(["[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"], [])
    assert downloads == [
        asks(["config.json"], OTHERS),
        asks(CONFIGS, OTHERS + VOCABULARIES),
        whole,
        whole,
        modules,
    ]


def test_a_gguf_file_and_a_folder_are_complete(tmp_path: Path, downloads: list[tuple[str, dict[str, Any]]]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes())
    assert Location("org/model:Q8_0").complete(path) == path
    assert Location(str(tmp_path)).complete(tmp_path) == tmp_path
    assert downloads == []


def test_the_tokenizer_of_a_gguf_file_of_the_hub_is_in_the_file(hub: list[list[str]], tmp_path: Path) -> None:
    assert Location("org/tiny-GGUF:Q8_0").tokenizer() == tmp_path / "cache" / HUB[1]


def test_an_adapter_is_a_folder_or_two_files_of_the_hub(
    tmp_path: Path, downloads: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter_folder("org/adapter") == tmp_path
    files = ["adapter_config.json", "adapter_model.safetensors"]
    options = {"revision": None, "cache_dir": None, "allow_patterns": files, "ignore_patterns": OTHERS}
    assert downloads == [("org/adapter", options)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "adapter").mkdir(parents=True)
    assert adapter_folder("org/adapter") == tmp_path / "org" / "adapter"
    assert adapter_folder("org/adapter:x") == tmp_path / "org" / "adapter:x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapter_folder("~/adapter") == tmp_path / "adapter"
    assert len(downloads) == 1
    with pytest.raises(CheckpointError, match="'~nobody_of_this_name/x' cannot be looked up"):
        adapter_folder("~nobody_of_this_name/x")


def test_what_is_downloaded_is_an_id_of_the_hub_and_nothing_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    names = ("org/model", "org/model:Q4_K_M", "org/here", "quire-tiny", "model", "a/b/c", "-a/b", "~/model")
    assert [name for name in names if is_downloadable(name)] == ["org/model", "org/model:Q4_K_M"]


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    assert Location("~/model").find() == Location("~/model").tokenizer() == folder


def test_the_nearest_embedded_checkpoint_is_named() -> None:
    message = (
        r"no folder or file 'quire-tini', did you mean 'quire-tiny'.*\(allowed: a folder, .*or quire-tiny, quire-dr"
    )
    with pytest.raises(CheckpointError, match=message):
        Location("quire-tini").find()


@pytest.mark.parametrize(("number", "rest"), [(12, ": name one"), (13, " and others: name one")])
def test_a_message_names_twelve_files(hub: list[list[str]], number: int, rest: str, monkeypatch: Any) -> None:
    asked = []

    def files(api: Any, name: str, *, revision: str | None) -> list[str]:
        asked.append((name, revision))
        return [f"{i}.gguf" for i in range(number)]

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", files)
    for location in (Location("org/tiny-GGUF", None, "v2"), Location("org/tiny-GGUF:Q1", None, "v2")):
        with pytest.raises(CheckpointError, match=rf"; it has 0\.gguf, 1\.gguf, .*11\.gguf{rest}"):
            location.find()
    assert asked == [("org/tiny-GGUF", "v2")] * 2
