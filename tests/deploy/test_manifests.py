"""deploy/: files for Kubernetes and Compose are valid, and say what the server does."""

import re
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from quire.cli import _parser
from quire.config.machine import parse_bytes
from quire.server.app import ROUTES
from quire.server.config import ServerArgs, merge_args

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.37"
ENGINE_END_S = 10
"""How long the processes of a server may take to end after the last request."""
CONFIG_FOLDER = "/etc/quire/config"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


MANIFESTS = {each["kind"]: each for name in ("quire.yaml", "autoscaling.yaml") for each in documents(name)}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture
def config(tmp_path: Path) -> tuple[ServerArgs, Any]:
    """What the server makes of the ConfigMap."""
    (name, text), *others = MANIFESTS["ConfigMap"]["data"].items()
    assert not others
    assert CONTAINER["args"] == ["--config", f"{CONFIG_FOLDER}/{name}"]
    (tmp_path / name).write_text(text)
    args, (model,) = merge_args(str(tmp_path / name), {})
    return args, model.engine


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_manifests_are_valid(kind: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], KUBERNETES, strict=True)


def test_the_validator_finds_a_wrong_name() -> None:
    wrong = {**MANIFESTS["Service"], "spec": {**MANIFESTS["Service"]["spec"], "port": 80}}
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_everything_selects_the_pods() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    for kind, name in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        assert MANIFESTS[kind]["spec"][name] == {"matchLabels": labels}
    target, deployment = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"], MANIFESTS["Deployment"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}


def test_the_server_listens_where_it_is_expected(config: Any) -> None:
    args, _ = config
    (port,) = CONTAINER["ports"]
    assert args.port == port["containerPort"] == ServerArgs.__dataclass_fields__["port"].default
    assert args.host == "0.0.0.0"
    assert not args.allow_unauthenticated
    assert not args.guard_health, "probes have no key"
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert MANIFESTS["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"port": port["name"]}]


@pytest.mark.parametrize(
    ("probe", "path"), [("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")]
)
def test_probes_ask_what_the_server_answers(probe: str, path: str) -> None:
    asked = CONTAINER[probe]
    assert asked["httpGet"] == {"path": path, "port": CONTAINER["ports"][0]["name"]}
    assert {(row.path, row.method, row.kind) for row in ROUTES} >= {(path, "GET", "health")}
    assert asked["timeoutSeconds"] >= 1


def test_an_engine_has_the_time_to_be_replaced_before_the_pod_is(config: Any) -> None:
    args, _ = config
    liveness = CONTAINER["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= args.hang_timeout_s + 60


def test_a_pod_has_the_time_to_drain(config: Any) -> None:
    args, _ = config
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = CONTAINER["readinessProbe"]
    assert pause >= readiness["periodSeconds"] * readiness["failureThreshold"]
    assert POD["terminationGracePeriodSeconds"] >= pause + args.drain_timeout_s + ENGINE_END_S / 2


def test_what_the_server_uses_fits_into_its_limits(config: Any) -> None:
    _, engine = config
    limits = CONTAINER["resources"]["limits"]
    assert CONTAINER["resources"]["requests"] == limits, "so that it is guaranteed"
    assert engine.num_threads == int(limits["cpu"])
    memory = parse_bytes("memory", limits["memory"].replace("Gi", "GiB"))
    assert 2 * parse_bytes("kv_cache_memory", engine.kv_cache_memory) < memory
    engine.resolve()


def test_a_pod_has_no_rights_that_it_does_not_need(config: Any) -> None:
    args, _ = config
    user = re.search(r"^USER (\d+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == int(user[1])
    security = CONTAINER["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes[mounts[CONFIG_FOLDER]]["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]
    assert "secret" in volumes[mounts[str(Path(args.api_key_file).parent)]]
    written = {variable["value"] for variable in CONTAINER["env"] if variable["name"] == "HF_HOME"} | {"/tmp"}
    assert all("emptyDir" in volumes[mounts[path]] for path in written)


def test_the_autoscalers_metric_is_one_of_the_servers() -> None:
    rule = (DEPLOY / "kubernetes" / "autoscaling.yaml").read_text()
    (series,) = re.findall(r"seriesQuery: '([\w:]+)\{", rule)
    (alias,) = re.findall(r"name: \{as: (\w+)\}", rule)
    (metric,) = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == alias
    assert f"`{series}`" in (DEPLOY.parent / "docs" / "metrics.md").read_text()
    spec = MANIFESTS["HorizontalPodAutoscaler"]["spec"]
    assert spec["minReplicas"] >= MANIFESTS["Deployment"]["spec"]["replicas"] > 1


def test_the_compose_file_is_valid() -> None:
    spec = compose_spec.PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text()).to_spec()
    assert set(spec.services or {}) == {"quire", "prometheus"}
    with pytest.raises(ValueError, match="portz"):
        compose_spec.PyCompose.from_yaml("services: {a: {image: x, portz: []}}")


def test_the_compose_file_serves_what_it_publishes() -> None:
    service = COMPOSE["services"]["quire"]
    command = ["serve", *service["command"]]
    options = _parser(command).parse_args(command)
    assert service["ports"] == [f"127.0.0.1:{options.port}:{options.port}"]
    assert options.data_parallel_size > 1
    assert compose_spec.parse_duration(service["stop_grace_period"]) >= options.drain_timeout_s + 10
    assert service["environment"].keys() == {"QUIRE_API_KEY"}
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    build = service["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert (context / build["dockerfile"]).is_file()
    home = re.search(r"^ENV HF_HOME=(\S+)$", (context / build["dockerfile"]).read_text(), re.MULTILINE)
    assert home is not None
    assert f"models:{home[1]}" in service["volumes"]
    (scrape,) = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"quire:{options.port}"]}]


def test_images_have_the_version_of_quire() -> None:
    from quire import __version__

    assert CONTAINER["image"] == COMPOSE["services"]["quire"]["image"] == f"quire:{__version__}"
