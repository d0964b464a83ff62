"""The containers' files: by their own tools, and against the program that they start. No image is built here."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from kvcache_proto.sizes import parse_size
from kvcache_server.config import load
from kvcache_server.http import schema as api

ROOT = Path(__file__).parents[2]
DOCKER, K8S = ROOT / "deploy" / "docker", ROOT / "deploy" / "k8s"
FOLDER = "/run/kvcache"
GROUP = 10321


def checked(*command: object) -> str:
    """Run a tool that came with the environment; it must find no fault."""
    program = Path(sys.executable).parent / str(command[0])
    done = subprocess.run([program, *map(str, command[1:])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# Docker.


def instructions(stage: str) -> list[str]:
    """The lines of a stage of the Dockerfile, joined where they go on."""
    text = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text())
    return text.split(f" AS {stage}\n")[1].split("\nFROM ")[0].splitlines()


def environment_of_image() -> dict[str, str]:
    (line,) = (line for line in instructions("daemon") if line.startswith("ENV "))
    return dict(pair.split("=", 1) for pair in line.removeprefix("ENV ").split())


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


def test_hadolint_accepts_the_dockerfile() -> None:
    assert checked("hadolint", "--strict-labels", DOCKER / "Dockerfile") == ""
    assert f"USER {GROUP}:{GROUP}" in instructions("daemon")


def test_the_compose_file_is_valid() -> None:
    checked("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")


def test_the_build_context_has_what_the_wheel_needs_and_little_more() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert patterns[0] == "*"
    allowed = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for taken in (
        *wheel["packages"],
        *wheel["force-include"],
        project["project"]["readme"],
        "LICENSE",
        "pyproject.toml",
    ):
        assert any(taken == each or taken.startswith(each + "/") for each in allowed), f"{taken} is not in the context"
    assert all((ROOT / each).exists() for each in allowed)
    assert not any(fnmatch.fnmatch(".git/config", each) or each.startswith("tests/e2e") for each in allowed)


def test_the_healthcheck_of_the_image(start_daemon: Any, short_folder: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHE_")}
    environ["KVCACHE_ENDPOINT"] = environment_of_image()["KVCACHE_ENDPOINT"].replace(FOLDER, str(short_folder))
    (line,) = (line for line in instructions("daemon") if line.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(line.split("CMD ")[1])
    assert program == "kvcache-server"
    check = [sys.executable, "-m", "kvcache_server", *arguments]
    assert subprocess.run(check, env=environ, capture_output=True).returncode == 4
    start_daemon(endpoint=environ["KVCACHE_ENDPOINT"])
    assert subprocess.run(check, env=environ, capture_output=True).returncode == 0


def test_the_daemon_as_started_by_compose(start_daemon: Any, short_folder: Path) -> None:
    told = compose()["services"]["daemon"]["environment"]
    environ = environment_of_image() | {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for key, value in told.items()}
    config = load(None, environ)
    assert (config.endpoint, config.region_dir) == (f"ipc://{FOLDER}/kvcache.sock", "/region")
    assert config.size == 8 << 30
    endpoint = config.endpoint.replace(FOLDER, str(short_folder))
    environ |= {"KVCACHE_REGION_DIR": "/dev/shm", "KVCACHE_SIZE": "64MiB", "KVCACHE_ENDPOINT": endpoint}
    environ["KVCACHE_HTTP"] = "127.0.0.1:0"
    daemon = start_daemon(endpoint=endpoint, size=None, region_dir=None, env=environ)
    address = daemon.status()["daemon"]["http"]["address"]
    for path in ("/healthz", "/readyz", "/metrics"):
        with urllib.request.urlopen(address + path, timeout=30) as answer:
            assert answer.status == 200


def test_engines_and_daemon_share_one_folder_and_start_independently() -> None:
    services = compose()["services"]
    engines = [services[name] for name in services if name.startswith("engine")]
    assert len(engines) == 2
    for service in (services["daemon"], services["folders"], *engines):
        assert f"sockets:{FOLDER}" in service["volumes"]
    for engine in engines:
        assert engine["environment"]["KVCACHE_ENDPOINT"] == environment_of_image()["KVCACHE_ENDPOINT"]
        assert str(GROUP) in engine["group_add"]
        assert "daemon" not in engine["depends_on"]
        assert not any("/region" in volume for volume in engine["volumes"])
        transfer = json.loads(engine["command"][engine["command"].index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "KVCacheServerConnector"


# Kubernetes.


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    kustomization = yaml.safe_load((K8S / "kustomization.yaml").read_text())
    ours = kustomization["resources"]
    named = {*ours, *kustomization["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert {file.name for file in K8S.iterdir()} - named == {"engine.yaml"}  # an example: nobody's model starts unasked
    return {
        each["kind"]: each for name in (*ours, "engine.yaml") for each in yaml.safe_load_all((K8S / name).read_text())
    }


def test_the_manifests_are_valid() -> None:
    for file in K8S.glob("*.yaml"):
        if file.name not in ("kustomization.yaml", "podmonitor.yaml"):  # which are no kinds of Kubernetes' own
            assert " passed for resource " in checked("kubernetes-validate", "--strict", file)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has kustomize in it, is not here")
def test_the_manifests_agree_with_each_other(tmp_path: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", K8S], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] != "PodMonitor"]
    (tmp_path / "built.yaml").write_text(yaml.safe_dump_all(built))
    checked("kubernetes-validate", "--strict", tmp_path / "built.yaml")
    kinds = {each["kind"]: each for each in built}
    (config,) = (v for v in kinds["DaemonSet"]["spec"]["template"]["spec"]["volumes"] if "configMap" in v)
    assert config["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    assert {each["metadata"].get("namespace", "kvcache") for each in built} == {"kvcache"}


def test_the_memory_limit_of_the_daemon_includes_its_region(manifests: dict[str, Any]) -> None:
    config = load(str(K8S / "kvcache.toml"), environment_of_image())
    (daemon,) = manifests["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    resources = daemon["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert parse_size(resources["limits"]["memory"] + "B") >= config.size + (1 << 30)


def test_selectors_and_probes_match_their_pods(manifests: dict[str, Any]) -> None:
    daemons = manifests["DaemonSet"]["spec"]
    labels = daemons["template"]["metadata"]["labels"]
    assert daemons["selector"]["matchLabels"] == labels
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert manifests["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    (daemon,) = daemons["template"]["spec"]["containers"]
    port = load(str(K8S / "kvcache.toml"), environment_of_image()).http.rpartition(":")[2]
    assert daemon["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert daemons["template"]["spec"]["priorityClassName"] == manifests["PriorityClass"]["metadata"]["name"]
    paths = api.openapi("0")["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert daemon[probe]["httpGet"]["path"] in paths and daemon[probe]["httpGet"]["port"] == "http"
    (endpoint,) = manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics" and endpoint["port"] == "http"


def test_engines_mount_the_folder_of_their_node_and_have_its_group(manifests: dict[str, Any]) -> None:
    daemon, engine = (manifests[kind]["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
    (ours,) = (volume["hostPath"]["path"] for volume in daemon["volumes"] if volume["name"] == "sockets")
    (its,) = (volume["hostPath"]["path"] for volume in engine["volumes"] if "hostPath" in volume)
    assert ours == its == FOLDER
    assert engine["securityContext"]["supplementalGroups"] == [daemon["securityContext"]["runAsGroup"]] == [GROUP]
    (container,) = engine["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert environ["KVCACHE_ENDPOINT"] == environment_of_image()["KVCACHE_ENDPOINT"]
    (transfer,) = (each for each in container["args"] if each.startswith("--kv-transfer-config="))
    assert json.loads(transfer.partition("=")[2])["kv_connector"] == "KVCacheServerConnector"


def test_the_init_container_creates_what_the_daemon_needs(manifests: dict[str, Any]) -> None:
    (init,) = manifests["DaemonSet"]["spec"]["template"]["spec"]["initContainers"]
    service = compose()["services"]["folders"]
    assert init["command"] == service["entrypoint"]
    assert [mount["mountPath"] for mount in init["volumeMounts"]] == init["command"][-2:]
