"""The chart: rendered by helm against kept files, valid for Kubernetes, and made of what exists.

helm comes from PATH or from $HELM. Without it the kept files are still checked; with it they are
compared, and `AERIE_WRITE_GOLDEN=1` writes them anew.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

from prometheus_client import Counter, Gauge, Histogram  # noqa: E402 - after the skip

from app.observability import metrics  # noqa: E402
from app.settings import (  # noqa: E402
    REPOSITORY,
    load,
    of_preset,
    preset_names,
    section_of,
    sections,
)

CHART = REPOSITORY / "deploy" / "helm" / "aerie"
HERE = Path(__file__).parent / "charts"
CASES = ("default", "gpu", "hpa")
HELM = os.environ.get("HELM") or shutil.which("helm")
PRESETS_SEQUENCES = 128
WRITE_GOLDEN = "AERIE_WRITE_GOLDEN" in os.environ
KUBERNETES = "1.33"
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm (PATH, or $HELM)")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


IMAGE = ("--set", "image.repository=registry.example/aerie")


def render(*arguments: str, chart: Path = CHART) -> str:
    done = helm("template", "aerie", str(chart), "--namespace", "serving", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def parsed(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def kept(case: str) -> list[dict[str, Any]]:
    return parsed((HERE / f"{case}.golden.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as `build.sh` packages it."""
    into = tmp_path_factory.mktemp("package")
    done = subprocess.run(
        [str(CHART.parent / "build.sh"), str(into)],
        env={**os.environ, "HELM": str(HELM)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = into.glob("*.tgz")
    return file


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod(case: str) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(kept(case), "Deployment")["spec"]["template"]["spec"]
    return spec


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_the_chart_renders_what_is_kept(case: str) -> None:
    text = render("--values", str(HERE / f"{case}.yaml"))
    golden = HERE / f"{case}.golden.yaml"
    if WRITE_GOLDEN:
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8")


@needs_helm
def test_lint() -> None:
    done = helm("lint", "--strict", str(CHART), *IMAGE)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["--set", "replica=2"], "replica"),
        (["--set", "gpus=many"], "gpus"),
        (["--set", "config.modle.k=1"], "modle"),
        (["--set", "redis.url=http://x"], "redis"),
        (["--set", "autoscaling.kind=vpa"], "kind"),
        (["--set", "strategy.type=Rolling"], "type"),
        (["--set", "strategy.rollingUpdate.maxSurge=one"], "maxSurge"),
        (["--set", "strategy.rollingUpdate.maxSurge=0"], "no pod can be replaced"),
        (["--set", "cache.sizeLimit=100 GiB"], "sizeLimit"),
        (["--set", "resources.limits.memory=4Gi"], "requests.memory: 8Gi is more than the limit"),
        (["--set", "resources.limits.memory=8G,gpus=1"], "8Gi is more than the limit of 8G"),
        (["--set", "resources.limits.cpu=1500m"], "requests.cpu: 2 is more than the limit"),
        (["--set", "keys.text=a", "--set", "keys.existingSecret=b"], "not both"),
        (["--set", "autoscaling.minReplicas=9"], "more than maxReplicas"),
        (["--set-json", "autoscaling.speedup=1.5"], "only kind keda"),
        (["--set", "service.sessionAffinity=Cookie"], "sessionAffinity"),
        (
            [
                *("--set", "serviceMonitor.enabled=true,keys.text=a"),
                *("--set-string", r"config.admission.public_paths=/livez\, /readyz"),
            ],
            "serviceMonitor.apiKey",
        ),
        (["--set", "keys.text=a,config.admission.public_paths=/metrics"], "asks /livez"),
        (["--set", r"keys.text=a,config.admission.public_paths=/livez\,/x"], "asks /readyz"),
        (["--set", "keys.text=a", "--set-string", "config.admission.public_paths="], "asks /livez"),
        (["--set", "config.server.port=1"], "the chart sets it"),
        (["--set", "config.learning.learn=/var/cache/aerie/learn"], "strategy.type Recreate"),
        (
            ["--set", "config.learning.learn=/x,strategy.type=Recreate,replicas=2"],
            "give replicas 1",
        ),
        (
            ["--set", "config.learning.learn=/x,strategy.type=Recreate,autoscaling.kind=hpa"],
            "without an autoscaler",
        ),
        (["--set", "config.engine.tensor_parallel_size=2"], "the chart sets it"),
        (["--set", "config.admission.api_key=sk-x"], "plain text"),
        (["--set", "image.repository="], "image.repository: name the registry"),
        (["--set", "ingress.enabled=true"], "hosts names none"),
        (["--set", "prometheusRule.runbookUrl=docs"], "runbookUrl"),
        (["--set", "prometheusRule.enabled=true"], "build.sh"),
        (["--set", "dashboards.enabled=true"], "build.sh"),
    ],
)
def test_wrong_values_are_refused(values: list[str], words: str) -> None:
    done = helm("template", "aerie", str(CHART), *IMAGE, *values)
    assert done.returncode != 0
    assert words in done.stderr


@needs_helm
def test_alerts_have_an_absolute_runbook_where_the_docs_are_published(package: Path) -> None:
    switches = "prometheusRule.enabled=true,prometheusRule.runbookUrl=https://docs.example/aerie/"
    documents = parsed(render(*IMAGE, "--set", switches, chart=package))
    for group in of_kind(documents, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                anchor = rule["alert"].lower()
                url = f"https://docs.example/aerie/alerts.md#{anchor}"
                assert rule["annotations"]["runbook_url"] == url


@needs_helm
@pytest.mark.parametrize(
    "strategy",
    ["type=Recreate", "rollingUpdate.maxSurge=0,strategy.rollingUpdate.maxUnavailable=1"],
)
def test_one_pod_that_is_replaced_before_the_next_one_starts_may_learn(strategy: str) -> None:
    values = f"config.learning.learn=/var/cache/aerie/learn,strategy.{strategy}"
    documents = parsed(render(*IMAGE, "--set", values))
    assert (
        'learn = "/var/cache/aerie/learn"' in of_kind(documents, "ConfigMap")["data"]["aerie.toml"]
    )


@needs_helm
@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ("gpus=0", {"memory": "8Gi"}),
        ("resources.requests.memory=64Gi", {"memory": "64Gi"}),
        ("resources.requests.memory=900M,resources.limits.memory=1Gi", {"memory": "1Gi"}),
        ("resources.limits.memory=null", {}),
        # With the 8 GiB of the CPU's default the kernel ended a pod with a GPU.
        ("gpus=1", {"nvidia.com/gpu": "1"}),
        ("gpus=1,resources.requests.memory=64Gi", {"nvidia.com/gpu": "1"}),
        (
            "gpus=1,resources.requests.memory=64Gi,resources.limits.memory=0.1Ti",
            {"nvidia.com/gpu": "1", "memory": "0.1Ti"},
        ),
    ],
)
def test_memory_is_limited_without_gpus_or_if_asked_for(
    values: str, limits: dict[str, str]
) -> None:
    deployment = of_kind(parsed(render(*IMAGE, "--set", values)), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == limits


@needs_helm
def test_names_can_be_others() -> None:
    documents = parsed(render(*IMAGE, "--set", "nameOverride=llm,fullnameOverride=chat"))
    deployment = of_kind(documents, "Deployment")
    assert deployment["metadata"]["name"] == of_kind(documents, "Service")["metadata"]["name"]
    assert deployment["metadata"]["name"] == "chat"
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "llm"


@needs_helm
@pytest.mark.parametrize(
    ("values", "several"),
    [("replicas=1", False), ("replicas=2", True), ("autoscaling.kind=hpa", True)],
)
def test_the_notes_say_that_pods_do_not_share_kept_responses(values: str, several: bool) -> None:
    done = helm("install", "aerie", str(CHART), "--dry-run=client", *IMAGE, "--set", values)
    assert done.returncode == 0, done.stderr
    assert ("previous_response_id" in done.stdout) is several
    assert "counts quotas by itself" not in done.stdout  # there are no keys
    for redis, warned in (("", several), ("redis://r", False)):
        keyed = f"keys.text=a,redis.url={redis},{values}"
        done = helm("install", "aerie", str(CHART), "--dry-run=client", *IMAGE, "--set", keyed)
        assert done.returncode == 0, done.stderr
        assert ("counts quotas by itself" in done.stdout) is warned


@needs_helm
def test_the_package_holds_rules_and_dashboards_of_the_repository(package: Path) -> None:
    """All of them as they are, braces included, and no tests of rules."""
    switches = "prometheusRule.enabled=true,dashboards.enabled=true"
    documents = parsed(render(*IMAGE, "--set", switches, chart=package))
    groups = of_kind(documents, "PrometheusRule")["spec"]["groups"]
    sources = (REPOSITORY / "deploy" / "prometheus" / "rules").glob("*.yml")
    written = [group for file in sources for group in yaml.safe_load(file.read_text())["groups"]]
    assert sorted(group["name"] for group in groups) == sorted(group["name"] for group in written)
    assert {group["name"]: group for group in groups} == {group["name"]: group for group in written}
    (boards,) = [d["data"] for d in documents if d["metadata"]["name"] == "aerie-dashboards"]
    files = {file.name: file for file in (REPOSITORY / "deploy" / "grafana").rglob("*.json")}
    assert set(boards) == set(files)
    for name, text in boards.items():
        assert json.loads(text) == json.loads(files[name].read_text())


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_it(case: str) -> None:
    """Against the API's own schemas; those of operators (KEDA, Prometheus) are not among them."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    checked = 0
    for document in kept(case):
        if document["apiVersion"].split("/")[0].endswith((".sh", ".com")):
            continue
        validate.validate(document, KUBERNETES, strict=True)
        checked += 1
    assert checked >= 5


def environ_of(case: str, folder: Path) -> dict[str, str]:
    """The gateway's variables in the pod; its file is in `folder`."""
    (container,) = pod(case)["containers"]
    own = {entry["name"]: entry.get("value", "x") for entry in container["env"]}
    file = folder / "aerie.toml"
    file.write_text(of_kind(kept(case), "ConfigMap")["data"]["aerie.toml"])
    return {
        **{name: value for name, value in own.items() if name.startswith("AERIE_")},
        "AERIE_CONFIG": str(file),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_pod_s_settings_are_the_gateway_s(case: str, tmp_path: Path) -> None:
    """Environment and file load as they would in the pod."""
    (container,) = pod(case)["containers"]
    environ = environ_of(case, tmp_path)
    names = {name.removeprefix("AERIE_").lower() for name in environ}
    assert names - {"config", "preset"} <= set(section_of())
    settings = load({}, environ)
    assert settings.server.port == container["ports"][0]["containerPort"]
    assert settings.server.host == "0.0.0.0"
    if case == "gpu":
        assert settings.model.model == "openai/gpt-oss-120b"
        assert settings.engine.tensor_parallel_size == 2
        assert settings.engine.max_num_seqs == 64  # the file beats the preset
        assert settings.engine.engine_args["stream_interval"] == 4  # beside the preset's
        assert isinstance(settings.engine.engine_args["stream_interval"], int)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert settings.admission.keys_file == "/etc/aerie-keys/keys.toml"
        assert settings.admission.redis_url == "redis://redis:6379/0"


def service_links(service: dict[str, Any], address: str = "10.96.0.7") -> dict[str, str]:
    """What Kubernetes puts into the pods of a namespace for a Service."""
    name = service["metadata"]["name"].upper().replace("-", "_")
    first = service["spec"]["ports"][0]["port"]
    links = {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(first),
        f"{name}_PORT": f"tcp://{address}:{first}",
    }
    for port in service["spec"]["ports"]:
        number, variable = str(port["port"]), f"{name}_PORT_{port['port']}_TCP"
        links[f"{name}_SERVICE_PORT_{port['name'].upper()}"] = number
        links[variable] = f"tcp://{address}:{number}"
        links |= {
            f"{variable}_PROTO": "tcp", f"{variable}_PORT": number, f"{variable}_ADDR": address,
        }  # fmt: skip
    return links


@pytest.mark.parametrize("case", CASES)
def test_the_pod_starts_among_the_variables_of_services(case: str, tmp_path: Path) -> None:
    """Of its own Service, and of others whose names begin like it. The chart turns them off; who
    runs the image without the chart has them."""
    assert pod(case)["enableServiceLinks"] is False
    service = of_kind(kept(case), "Service")
    assert service["metadata"]["name"] == "aerie"
    redis = {"metadata": {"name": "aerie-redis"}, "spec": {"ports": [{"port": 6379, "name": "r"}]}}
    links = {**service_links(service), **service_links(redis)}
    assert links["AERIE_PORT"].startswith("tcp://")
    assert load({}, links) == load({}, {})
    (container,) = pod(case)["containers"]
    settings = load({}, {**links, **environ_of(case, tmp_path)})
    assert settings.server.port == container["ports"][0]["containerPort"]


@pytest.mark.parametrize("case", CASES)
def test_the_test_hook_looks_at_the_service(case: str) -> None:
    (hook,) = [d for d in kept(case) if d["kind"] == "Pod"]
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = hook["spec"]["containers"]
    assert (REPOSITORY / container["command"][-1]).is_file()
    service = of_kind(kept(case), "Service")
    port = service["spec"]["ports"][0]["port"]
    assert container["args"] == [f"http://{service['metadata']['name']}:{port}/readyz"]
    selector = service["spec"]["selector"].items()
    assert not selector <= hook["metadata"]["labels"].items(), "the hook is no pod of the service"


def test_the_docs_test_a_release_once_its_pods_are_ready() -> None:
    """The hook asks once, and a model loads for minutes."""
    page = (REPOSITORY / "docs" / "scale.md").read_text("utf-8")
    name = of_kind(kept("default"), "Deployment")["metadata"]["name"]
    install, wait, test = (
        page.index(f"\n    {command}")
        for command in (
            f"helm install {name} ",
            f"kubectl rollout status deployment/{name} ",
            f"helm test {name} ",
        )
    )
    assert install < wait < test


@pytest.mark.parametrize("case", CASES)
def test_the_pod_fits_the_image(case: str) -> None:
    """Its user, and the folder that it keeps models in, which must be writable."""
    image = (REPOSITORY / "Dockerfile").read_text("utf-8")
    spec = pod(case)
    security = spec["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in image
    (folder,) = re.findall(r"^VOLUME (\S+)", image, re.MULTILINE)
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[folder] == "cache"
    assert container["args"] == ["serve"]


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (
            "default",
            {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        ),
        # With the fixed one above an upgrade never ended on a cluster without a spare GPU.
        ("hpa", {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}),
        ("gpu", {"type": "Recreate"}),  # beside which Kubernetes takes no rollingUpdate
    ],
)
def test_an_upgrade_replaces_pods_as_the_values_say(case: str, strategy: dict[str, Any]) -> None:
    assert of_kind(kept(case), "Deployment")["spec"]["strategy"] == strategy


@pytest.mark.parametrize(
    ("case", "volume"),
    [
        # A limit below the size of the weights evicts the pod while it downloads, again and again.
        ("default", {"emptyDir": {}}),
        ("hpa", {"emptyDir": {"sizeLimit": "20Gi"}}),
        ("gpu", {"persistentVolumeClaim": {"claimName": "models"}}),
    ],
)
def test_the_cache_has_a_limit_only_where_one_is_given(case: str, volume: dict[str, Any]) -> None:
    (cache,) = [volume for volume in pod(case)["volumes"] if volume["name"] == "cache"]
    assert cache == {"name": "cache", **volume}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_time_to_drain(case: str) -> None:
    spec = pod(case)
    (container,) = spec["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(environ["AERIE_DRAIN_TIMEOUT_S"])
    assert spec["terminationGracePeriodSeconds"] >= before + drain + 5


@pytest.mark.parametrize(("case", "seconds"), [("default", 600), ("gpu", 1200)])
def test_a_start_has_time_to_read_the_head(case: str, seconds: int) -> None:
    """Before it listens. A large head on a slow network volume took longer than two minutes, and
    the kubelet ended every start."""
    (container,) = pod(case)["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


@pytest.mark.parametrize("case", CASES)
def test_no_request_is_above_its_limit(case: str) -> None:
    """Kubernetes refuses such a pod, which its schemas do not say."""
    (container,) = pod(case)["containers"]
    limits = container["resources"]["limits"]
    for name, request in container["resources"]["requests"].items():
        if name in limits:
            assert _number(request) <= _number(limits[name]), name


def _number(quantity: str) -> float:
    """The number that a quantity of Kubernetes is."""
    number, unit = re.fullmatch(r"([0-9.]+)(m|Gi)?", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1, "m": 1e-3, "Gi": 2**30}[unit]


@pytest.mark.parametrize("case", CASES)
def test_probes_are_routes(case: str) -> None:
    from app.routes.health import router

    paths = {route.path for route in router.routes}  # type: ignore[attr-defined]
    (container,) = pod(case)["containers"]
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert [container[probe]["httpGet"]["path"] for probe in probes] == [
        "/livez", "/livez", "/readyz",
    ]  # fmt: skip
    assert {container[probe]["httpGet"]["path"] for probe in probes} <= paths


def test_every_section_of_the_settings_may_be_set() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert set(schema["properties"]["config"]["properties"]) == set(sections())


def _ours() -> set[str]:
    return {
        metric.describe()[0].name + ("_total" if isinstance(metric, Counter) else "")
        for metric in vars(metrics).values()
        if isinstance(metric, (Counter, Gauge, Histogram))
    }


def _vllms() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    source = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:[a-z0-9_]+)"', source.read_text("utf-8")))


def _autoscaled() -> Iterator[tuple[str, str]]:
    """(case, metric) of everything an autoscaler looks at."""
    for trigger in of_kind(kept("gpu"), "ScaledObject")["spec"]["triggers"]:
        for name in re.findall(r"\b(?:aerie_|vllm:)[a-z0-9_]+", trigger["metadata"]["query"]):
            yield "keda", name
    for metric in of_kind(kept("hpa"), "HorizontalPodAutoscaler")["spec"]["metrics"]:
        yield "hpa", metric["pods"]["metric"]["name"]


def test_autoscalers_look_at_metrics_that_exist() -> None:
    found = list(_autoscaled())
    assert {"keda", "hpa"} == {case for case, _ in found}
    assert {name for _, name in found} - _ours() - _vllms() == set()


def test_autoscalers_name_what_they_scale() -> None:
    name = of_kind(kept("gpu"), "Deployment")["metadata"]["name"]
    keda = of_kind(kept("gpu"), "ScaledObject")["spec"]
    assert keda["scaleTargetRef"]["name"] == name
    service = of_kind(kept("gpu"), "Service")["metadata"]["name"]
    assert all(
        f'namespace="serving",service="{service}"' in trigger["metadata"]["query"]
        for trigger in keda["triggers"]
    )
    assert "replicas" not in of_kind(kept("gpu"), "Deployment")["spec"]
    hpa = of_kind(kept("hpa"), "HorizontalPodAutoscaler")["spec"]
    assert hpa["scaleTargetRef"]["name"] == of_kind(kept("hpa"), "Deployment")["metadata"]["name"]


@pytest.mark.parametrize(("case", "sequences"), [("gpu", 64), ("hpa", PRESETS_SEQUENCES)])
def test_busy_pods_are_kept_though_nothing_waits(case: str, sequences: int) -> None:
    """Of 9/8 of these sequences, which the gateway admits, 70%. By what waits alone, full pods that
    keep up were taken away down to the fewest."""
    if case == "gpu":
        triggers = of_kind(kept(case), "ScaledObject")["spec"]["triggers"]
        (running,) = [
            float(trigger["metadata"]["threshold"])
            for trigger in triggers
            if "aerie_gate_running" in trigger["metadata"]["query"]
        ]
    else:
        metrics_of_pods = of_kind(kept(case), "HorizontalPodAutoscaler")["spec"]["metrics"]
        (running,) = [
            float(metric["pods"]["target"]["averageValue"])
            for metric in metrics_of_pods
            if metric["pods"]["metric"]["name"] == "aerie_gate_running"
        ]
    assert running == math.ceil(sequences * 9 / 8 * 0.7)


def test_presets_run_as_many_sequences_as_autoscalers_take_for_granted() -> None:
    """Where the values do not say how many. The preset `embedded` is for tests."""
    names = set(preset_names()) - {"embedded"}
    assert {of_preset(name).engine.max_num_seqs for name in names} == {PRESETS_SEQUENCES}


def test_an_ingress_leads_to_all_but_the_metrics() -> None:
    from app.main import create_app
    from tests.app.http.fake_operation import FakeEngine

    (rule,) = of_kind(kept("gpu"), "Ingress")["spec"]["rules"]
    paths = [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]

    def leads_to(path: str) -> bool:
        return any(
            path == outside or (kind == "Prefix" and path.startswith(f"{outside}/"))
            for outside, kind in paths
        )

    settings = load({}, {}, preset="embedded")
    routes = {route.path for route in create_app(settings, FakeEngine(settings)).routes}  # type: ignore[attr-defined]
    assert {path for path in routes if not leads_to(path)} == {"/metrics"}


def test_prometheus_has_a_key_where_the_metrics_are_not_public(tmp_path: Path) -> None:
    public = load({}, environ_of("gpu", tmp_path)).admission.public_paths
    assert "/metrics" not in public
    (endpoint,) = of_kind(kept("gpu"), "ServiceMonitor")["spec"]["endpoints"]
    secret = {"name": "prometheus-key", "key": "key"}
    assert endpoint["authorization"] == {"credentials": secret}


@pytest.mark.parametrize(("case", "affinity"), [("default", None), ("hpa", "ClientIP")])
def test_a_service_sends_an_address_to_one_pod_if_asked(case: str, affinity: str | None) -> None:
    assert of_kind(kept(case), "Service")["spec"].get("sessionAffinity") == affinity


def test_selectors_match() -> None:
    documents = kept("gpu")
    labels = of_kind(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    service = of_kind(documents, "Service")
    assert service["spec"]["selector"].items() <= labels.items()
    budget = of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels.items()
    monitor = of_kind(documents, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= service["metadata"]["labels"].items()


def _series(name: str, pod: str, values: str, **labels: str) -> dict[str, str]:
    pairs = {"namespace": "serving", "service": "aerie", "pod": pod, **labels}
    text = ",".join(f'{label}="{value}"' for label, value in pairs.items())
    return {"series": f"{name}{{{text}}}", "values": values}


@pytest.mark.parametrize(
    ("running", "plain", "answers"),
    [
        # Two pods, 1.2 times as fast as without drafts, 1.5 wanted: 1.25 times the pods.
        ("20", "1.2", (7, 40, 1.25)),
        ("20", "3", (7, 40, 0.5)),
        ("2", "1.2", (7, 4, 0)),  # not busy
        (None, None, (None, None, 0)),  # no pod says anything
    ],
)
def test_what_keda_asks_has_these_answers(
    tmp_path: Path,
    running: str | None,
    plain: str | None,
    answers: tuple[float | None, float | None, float],
) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    triggers = of_kind(kept("gpu"), "ScaledObject")["spec"]["triggers"]
    rules = [
        {"record": f"trigger:{number}", "expr": trigger["metadata"]["query"]}
        for number, trigger in enumerate(triggers)
    ]
    series = []
    for pod_name in ("a", "b") if running is not None else ():
        series += [
            _series("aerie_gate_waiting", pod_name, "3x40"),
            _series("aerie_gate_running", pod_name, f"{running}x40"),
            _series("vllm:num_requests_waiting", pod_name, "0.5x40", engine="0"),
            _series("vllm:num_requests_running", pod_name, f"{running}x40", engine="0"),
            _series("aerie_decode_seconds_total", pod_name, "0+15x40"),
            _series(
                "aerie_decode_seconds_without_drafts_total",
                pod_name,
                f"0+{15 * float(plain or 0):g}x40",
            ),
        ]
    for name in ("aerie_gate_waiting", "aerie_gate_running"):
        series.append(_series(name, "c", "99x40", service="another"))
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f"round(trigger:{number}, 0.01)",
                        "eval_time": "9m",
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for number, value in enumerate(answers)
                    if value is not None
                ],
            }
        ],
    }
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]})
    )
    test = tmp_path / "keda.test.yml"
    test.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [promtool, "test", "rules", str(test)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
