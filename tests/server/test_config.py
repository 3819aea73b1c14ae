"""The server's arguments: flags, a file, or both, under one flat list of names."""

import argparse
import dataclasses
import re

import pytest
import yaml

from quire.cli import serve as serve_command
from quire.common.errors import ConfigError
from quire.config.args import EngineArgs
from quire.server.config import ServerArgs, describe_args, is_loopback, merge_args
from quire.server.models.spec import ModelSpec


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(argv)


def names_of(cls) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_server_and_engine_share_one_list_of_names():
    assert not names_of(ServerArgs) & names_of(EngineArgs)


def test_every_argument_is_a_flag():
    options = vars(parse("--port", "1", "--no-page", "--api-key", "a", "b", "--max-body-bytes", "1MiB", "--seed", "5"))
    assert options["port"] == 1
    assert options["page"] is False
    assert options["api_key"] == ["a", "b"]
    assert options["max_body_bytes"] == "1MiB"
    assert options["seed"] == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quire.yaml", "port: 81\nserved-model-name: [a, b]\nblock_size: 32\napi_key: secret\n"
         "tenant_weights: {a: 2}\n"),
        ("quire.toml", 'port = 81\nserved-model-name = ["a", "b"]\nblock_size = 32\napi_key = "secret"\n'
         "tenant_weights = {a = 2}\n"),
    ],
)  # fmt: skip
def test_flags_override_the_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    args, (spec,) = merge_args(str(tmp_path / name), {"port": 82, "max_num_seqs": 7})
    assert (args.port, args.served_model_name, args.api_key) == (82, ("a", "b"), ("secret",))
    assert (spec.engine.block_size, spec.engine.max_num_seqs, spec.engine.tenant_weights) == (32, 7, {"a": 2})


def test_texts_in_a_file_mean_what_they_mean_on_the_command_line(tmp_path):
    given = {"max_waiting": "2k", "tokens_per_minute": "1.5M", "block_size": "32", "max_num_batched_tokens": "4K"}
    given |= {"model_memory": "none", "hang_timeout_s": "None", "response_store": "none", "num_threads": "none"}
    given |= {"speculative_config": "none", "tenant_weights": "none"}
    (tmp_path / "quire.yaml").write_text("".join(f"{name}: {value}\n" for name, value in given.items()))
    (tmp_path / "quire.toml").write_text("".join(f"{name} = '{value}'\n" for name, value in given.items()))
    flags = vars(parse(*(f"--{name.replace('_', '-')}={value}" for name, value in given.items())))
    names = names_of(ServerArgs) | names_of(EngineArgs)
    found = merge_args(None, {name: value for name, value in flags.items() if name in names})
    for file in ("quire.yaml", "quire.toml"):
        assert merge_args(str(tmp_path / file), {}) == found
    args, (spec,) = found
    assert (args.max_waiting, args.tokens_per_minute) == (2000, 1.5 * 2**20)
    assert (spec.engine.block_size, spec.engine.max_num_batched_tokens, spec.engine.num_threads) == (32, 4096, None)
    assert (args.model_memory, args.hang_timeout_s, args.response_store) == (None, None, None)
    common, (a, b) = merge_args(None, {"max_num_seqs": "1k", "models": {"a": "x", "b": {"model": "y", "seed": "2k"}}})
    assert (common.max_waiting, a.engine.max_num_seqs, b.engine.seed) == (1024, 1000, 2000)


def test_what_is_printed_can_be_read_back_and_holds_no_key(tmp_path):
    args, (spec,) = merge_args(
        None,
        {"port": 9000, "api_key": ["hunter2"], "max_num_seqs": 3, "log_requests": False, "allowed_hosts": ["a", "b"]},
    )
    text = describe_args(args, spec)
    assert "hunter2" not in text
    admin = describe_args(ServerArgs(admin_key=("swordfish",)))
    assert "swordfish" not in admin
    assert yaml.safe_load(admin) == {"admin_key": "(1 not shown)"}
    assert yaml.safe_load(text) == {
        "port": 9000, "api_key": "(1 not shown)", "max_num_seqs": 3, "log_requests": False, "allowed_hosts": ["a", "b"],
    }  # fmt: skip
    assert describe_args(ServerArgs(otlp_endpoint="https://me:hunter2@host:1/x")) == (
        "otlp_endpoint: https://(not shown)@host:1/x"
    )
    assert describe_args(ServerArgs(), ModelSpec(("quire-tiny",), EngineArgs())) == "all arguments at their defaults"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prot": 1}, "unknown argument 'prot', did you mean 'port'"),
        ({"max_num_seq": 1}, "did you mean 'max_num_seqs'"),
        ({"port": "8O"}, "port='8O': must be int"),
        ({"port": True}, "port=True: must be int"),
        ({"port": 65536}, "port=65536: must be from 0"),
        ({"page": "yes"}, "page='yes': must be bool"),
        ({"served_model_name": [1]}, "served_model_name"),
        ({"block_size": "16B"}, "block_size='16B': must be int"),
        ({"max_waiting": "none"}, "max_waiting='none': must be int, not str"),
        ({"max_waiting": -1}, "max_waiting=-1: must be at least 0"),
        ({"requests_per_minute": 0}, "requests_per_minute=0: must be at least 1"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s=nan"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s=inf"),
        ({"hang_timeout_s": 2.9}, "hang_timeout_s=2.9: must be at least 3"),
        ({"port": -1}, "port=-1: must be from 0"),
        ({"request_timeout_s": 0}, "request_timeout_s=0: must be a number of seconds"),
        ({"body_timeout_s": float("inf")}, "body_timeout_s=inf"),
        ({"max_body_bytes": "ten"}, "max_body_bytes='ten'"),
        ({"max_header_bytes": 10}, "max_header_bytes=10: must be at least 1024"),
        ({"max_body_bytes": 1023}, "max_body_bytes=1023: must be at least 1024"),
        ({"ssl_keyfile": "key.pem"}, "require ssl_certfile"),
        ({"trusted_proxies": ["nginx"]}, "trusted_proxies has 'nginx': must be addresses"),
        ({"log_prompts": True, "log_requests": False}, "log_prompts"),
        ({"host": "0.0.0.0"}, "no API key is configured"),
        ({"host": "example.org"}, "no API key is configured"),
        ({"lora_dir": "/adapters"}, "lora_dir='/adapters' requires enable_lora"),
        ({"lora_dir": "/adapters", "models": {"a": "b"}}, "lora_dir='/adapters' requires enable_lora"),
        ({"guard_metrics": True}, "guard_metrics requires API keys"),
        ({"guard_health": True}, "guard_health requires API keys"),
        ({"allow_credentials": True}, "allow_credentials requires allowed_origins"),
        ({"model": "a", "models": {"b": "c"}}, "model='a' is given beside models"),
        ({"response_store": "a\0b"}, "response_store has a NUL character"),
        ({"allowed_origins": ["https://a.example/"]}, "allowed_origins has 'https://a.example/'"),
        ({"allowed_origins": ["a.example"]}, "allowed_origins has 'a.example'"),
        ({"allowed_origins": ["https://*.example"]}, "allowed_origins has 'https://*.example'"),
        ({"served_model_name": [""]}, "the model name '' must be given once"),
        ({"served_model_name": ["a", "b", "a"]}, "the model name 'a' must be given once"),
        ({"models": {"a\n": "quire-tiny"}}, "the model name 'a\\n' must be given once, not empty, without control"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(given, message, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    with pytest.raises(ConfigError) as raised:
        merge_args(None, given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [("log_format", "jsno", "json"), ("tool_parser", "hrmes", "hermes"), ("reasoning_parser", "thinks", "think")],
)
def test_a_wrong_choice_suggests_the_nearest(name, value, nearest):
    with pytest.raises(ConfigError, match=f"^{name}='{value}', did you mean '{nearest}'"):
        ServerArgs(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 0), ("port", 65535), ("max_waiting", 0), ("drain_timeout_s", 0), ("requests_per_minute", 1),
        ("hang_timeout_s", 3), ("hang_timeout_s", None), ("request_timeout_s", 1e-3), ("keep_alive_s", 1),
        ("max_body_bytes", 1024), ("max_header_bytes", "1KiB"),
    ],
)  # fmt: skip
def test_the_ends_of_every_range_are_in_it(name, value):
    assert getattr(ServerArgs(**{name: value}), name) == value


@pytest.mark.parametrize(
    "text",
    [
        "port: [", "- a\n- b\n", "just words", "!!python/object/apply:os.getcwd []", "port: !!int x", "port: 0x_",
        "a: !!timestamp x", "a: !!bool x", "a: 2001-99-99", "[" * 3000,
    ],
)  # fmt: skip
def test_a_file_other_than_a_list_of_names_is_refused(tmp_path, text):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"quire\.yaml"):
        merge_args(str(path), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nhost: a\nport: 2\n", "line 3: 'port' occurs twice"),
        ("models:\n  a: x\n  a: y\n", "line 3: 'a' occurs twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "'max_num_seqs' twice, with dashes and without"),
    ],
)
def test_no_name_in_a_file_is_dropped_for_another(tmp_path, text, message):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        merge_args(str(path), {})


@pytest.mark.parametrize(
    "text",
    ["api_key: [topsecret, 123]", "admin_key: 70953123", "api_key: [topsecret\nport: 1", "api_key: topsecret: x"],
)
def test_no_message_about_a_file_quotes_a_key(tmp_path, text):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        merge_args(str(path), {})
    assert not re.search("topsecret|70953", str(raised.value))


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        merge_args(str(tmp_path / "none.yaml"), {})
    for text in ("port: 80", "port = " + "1" * 5000, "port = " + "[" * 3000):
        (tmp_path / "quire.toml").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            merge_args(str(tmp_path / "quire.toml"), {})
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert merge_args(str(tmp_path / "empty.yaml"), {}) == (ServerArgs(), (ModelSpec(("quire-tiny",), EngineArgs()),))


def test_origins_are_those_of_browsers():
    origins = ("*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:5", "chrome-extension://abc")
    assert ServerArgs(allowed_origins=origins).allowed_origins == origins


def test_proxies_are_addresses_networks_or_any():
    for proxies in ("10.0.0.0/8",), ("192.0.2.1", "fd00::/8"), ("*",):
        assert ServerArgs(trusted_proxies=proxies).trusted_proxies == proxies


def test_sizes_are_numbers_of_bytes():
    args = ServerArgs(max_header_bytes="32KiB", max_body_bytes=2048)
    assert (args.max_header, args.max_body) == (32768, 2048)


def test_others_may_connect_only_with_a_key_or_leave(monkeypatch, tmp_path):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert ServerArgs(host="0.0.0.0", api_key=("k",)).has_api_key
    assert ServerArgs(host="0.0.0.0", allow_unauthenticated=True).is_local is False
    assert ServerArgs(host="0.0.0.0", uds=str(tmp_path / "s")).is_local
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    assert ServerArgs(host="::").has_api_key
    monkeypatch.setenv("QUIRE_API_KEY", " , ")
    with pytest.raises(ConfigError, match="no API key is configured"):
        ServerArgs(host="::")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("LOCALHOST.", True), ("0.0.0.0", False), ("::", False), ("", False),
     ("localhost.example.org", False), ("10.0.0.1", False), ("X127.0.0.1", False)],
)  # fmt: skip
def test_which_hosts_are_this_machine(host, expected):
    assert is_loopback(host) is expected


def test_a_model_is_named_once():
    options = parse("quire-tiny", "--model", "quire-draft")
    with pytest.raises(ConfigError, match="two models"):
        serve_command.run(options)


@pytest.mark.parametrize(
    ("given", "models"),
    [
        ("", []),
        ("a", ["a"]),
        ("a --also b", ["a", "b"]),
        ("--also x=b a --also c", ["a", "x=b", "c"]),
        ("--also b", ["quire-tiny", "b"]),
        ("--model a --also b", ["a", "b"]),
        ("a --also b --config f", ["a", "b"]),
    ],
)
def test_further_models_may_be_named_by_also(given, models):
    assert serve_command.models_of(parse(*given.split())) == models


def test_also_does_not_guess_beside_a_file():
    with pytest.raises(ConfigError, match="name the first model before it"):
        serve_command.models_of(parse("--also", "b", "--config", "f"))


MODELS = "models:\n  small: quire-tiny\n  large: {model: quire-draft, max-model-len: 64}\nmax_num_seqs: 4\n"


def test_a_file_may_have_several_models(tmp_path):
    path = tmp_path / "quire.yaml"
    path.write_text(MODELS)
    args, specs = merge_args(str(path), {"seed": 1})
    assert args == ServerArgs()
    assert specs == (
        ModelSpec(("small",), EngineArgs(model="quire-tiny", max_num_seqs=4, seed=1)),
        ModelSpec(("large",), EngineArgs(model="quire-draft", max_num_seqs=4, seed=1, max_model_len=64)),
    )
    shown = yaml.safe_load(describe_args(args, *specs))
    assert shown["models"]["large"] == {"model": "quire-draft", "max_num_seqs": 4, "seed": 1, "max_model_len": 64}


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["quire-draft"], {"quire-draft": "quire-draft"}),
        (["small=quire-draft"], {"small": "quire-draft"}),
        (["quire-tiny", "small=quire-draft"], {"quire-tiny": "quire-tiny", "small": "quire-draft"}),
        (["a=x=y", "org/b"], {"a": "x=y", "org/b": "org/b"}),
    ],
)
def test_models_of_the_command_line_take_precedence(tmp_path, models, expected):
    path = tmp_path / "quire.yaml"
    path.write_text(MODELS)
    specs = merge_args(str(path), {}, models)[1]
    assert {spec.name: spec.checkpoint for spec in specs} == expected
    assert all(spec.engine.max_num_seqs == 4 for spec in specs)


def test_a_folder_may_have_an_equals_sign(tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    (spec,) = merge_args(None, {}, [str(folder)])[1]
    assert (spec.name, spec.engine.model) == (str(folder), str(folder))


def test_a_name_may_have_any_other_characters():
    name = "/models/\u65e5\u672c\u3000\u8a9e \u00a0x"
    assert merge_args(None, {}, [name])[1][0].names == (name,)


def test_the_only_model_has_the_names_that_are_given():
    (spec,) = merge_args(None, {"served_model_name": ("x", "y"), "model": "quire-draft"}, ["quire-draft"])[1]
    assert (spec.names, spec.checkpoint) == (("x", "y"), "quire-draft")


@pytest.mark.parametrize(
    ("text", "models", "message"),
    [
        ("models: []", [], "models must contain names and checkpoints"),
        ("models: {}", [], "models must contain names and checkpoints"),
        ("models: {a: 5}", [], "'a' must be a checkpoint, or engine arguments"),
        ("models: {a: {dtype: auto}}", [], "'a' must be a checkpoint, or engine arguments that include `model`"),
        ("models: {a: {model: x, max_num_seq: 5}}", [], "'a': unknown argument 'max_num_seq', did you mean"),
        ("models: {a: {model: x, port: 5}}", [], "'a': unknown argument 'port'"),
        ("models: {a: {model: x, block_size: x}}", [], "'a': block_size='x': must be int"),
        ("{models: {a: x}, served_model_name: b}", [], "served_model_name cannot be combined with named models"),
        ("port: 1", ["a", "a"], "two models have the name 'a'"),
        ("port: 1", ["a=b", "a=c"], "two models have the name 'a'"),
        ("port: 1", ["=b"], "the model '=b' must be"),
        ("port: 1", ["b="], "the model 'b=' must be"),
        ("port: 1", [""], "the model '' must be"),
    ],
)
def test_models_that_cannot_be_are_refused(tmp_path, text, models, message):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        merge_args(str(path), {}, models)
    assert message in str(raised.value)


def test_a_model_given_twice_must_be_the_same():
    with pytest.raises(ConfigError, match="two models are given, 'a' and 'b': give one"):
        merge_args(None, {"model": "b"}, ["a"])
    with pytest.raises(ConfigError, match="two models are given, 'a' and 'c': give one"):
        merge_args(None, {"model": "c"}, ["a", "c"])


def test_an_engines_argument_of_vllm_without_effect_is_taken():
    _, (spec,) = merge_args(None, {"enable_sleep_mode": False})
    assert spec.engine == EngineArgs()


def test_the_format_of_a_templates_content_is_one_of_three():
    with pytest.raises(ConfigError, match=r"^chat_template_content_format='open', did you mean 'openai'"):
        ServerArgs(chat_template_content_format="open")


def test_the_memory_of_all_models_is_a_size():
    with pytest.raises(ConfigError, match=r"^model_memory='much'"):
        ServerArgs(model_memory="much")
    with pytest.raises(ConfigError, match="model_keep_alive_s=-1"):
        ServerArgs(model_keep_alive_s=-1.0)
    with pytest.raises(ConfigError, match="model_wait_s=0"):
        ServerArgs(model_wait_s=0)


def test_tags_of_your_own_are_a_reasoning_parser():
    assert ServerArgs(reasoning_parser="<plan>...</plan>").reasoning_parser == "<plan>...</plan>"
