"""Scrape configuration, alerts and dashboard, against promtool and against what a real daemon exports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvcache_proto import messages as m
from kvcache_proto.counts import CLIENT_COUNTS
from kvcache_proto.types import Breaker, GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin_client import AdminClient

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "kvcache.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "kvcache.json"

# What Grafana puts in for its variables.
VARIABLES = {"$__rate_interval": "5m", "$__range": "3h", "$instance": ".*", "$namespace": ".*"}


def promtool(*arguments: str | Path, text: bytes = b"") -> str:
    """Return what promtool says. Raises AssertionError where it is not content; skips where it is not there."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tool = shutil.which("promtool", path=path)
    if tool is None:
        pytest.skip("no promtool here: it is in Debian's package `prometheus`, and on prometheus.io")
    done = subprocess.run([tool, *map(str, arguments)], input=text, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def exported(
    start_module_daemon: Any, tmp_path_factory: Any
) -> Iterator[tuple[bytes, list[tuple[str, dict[str, str]]]]]:
    """The text of a daemon that has met everything once, and its samples: (name, labels)."""
    tier = f"disk:{tmp_path_factory.mktemp('tier')}/tier?size=64MiB"
    daemon = start_module_daemon(http="127.0.0.1:0", events="tcp://127.0.0.1:0", tier=tier)
    daemon.wait_status(lambda status: status["daemon"]["tiers"], "the tier")
    with AdminClient(daemon.endpoint, engine="e") as engine:
        spec = NamespaceSpec("m", (GroupSpec(16, 4096),))
        namespace = engine.ask(m.Attach(0, b"", spec, (0,))).namespace
        run = [number.to_bytes(32, "little") for number in range(4)]
        reserved = engine.ask(m.Reserve(0, b"", namespace, [m.Run(run)]))
        region = engine.geometry.region_id
        engine.ask(m.Settle(0, b"", region, reserved.reservation, (0,), Outcome.COMMITTED))
        engine.ask(m.Acquire(0, b"", namespace, run))
        engine.tell(m.ReportClient(0, b"", Breaker.CLOSED, dict.fromkeys(CLIENT_COUNTS, 1)))
        engine.ping()
        with urllib.request.urlopen(daemon.status()["daemon"]["http"]["address"] + "/metrics", timeout=20) as answer:
            text = answer.read()
        families = text_string_to_metric_families(text.decode())
        yield text, [(sample.name, dict(sample.labels)) for family in families for sample in family.samples]


def series(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each metric of a query that is ours, with the labels that it is asked for by value."""
    for name, _, matchers in re.findall(r"\b(kvcache_\w+)(\{([^}]*)\})?", expression):
        equal = re.findall(r'(\w+)="([^"]*)"', matchers)
        yield name, {label: value for label, value in equal if label not in ("instance", "job")}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Return what panels and alerts ask, each with its name, and what fills the dashboard's variables."""
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    asked += [(alert["alert"], alert["expr"]) for alert in alerts()]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked.append((variable["name"], variable["query"]["query"]))
    return asked


def test_the_scrape_configuration_is_valid() -> None:
    said = promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert "1 rule files found" in said
    assert f"{len(alerts())} rules found" in said


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", DEPLOY / "prometheus" / "kvcache.rules.test.yml")


def test_exported_metrics_follow_the_conventions(exported: Any) -> None:
    assert promtool("check", "metrics", text=exported[0]) == ""


def test_prometheus_understands_the_queries_of_the_panels(tmp_path: Path) -> None:
    rules = []
    for number, panel in enumerate(panels()):
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            rules.append({"record": f"panel:{number}", "expr": expression})
    for number, rule in enumerate(rules):  # the same one twice is more than it likes
        rule["record"] += f":{number}"
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


@pytest.mark.parametrize(("where", "expression"), queries(), ids=[f"{at} {q[0]}" for at, q in enumerate(queries())])
def test_every_queried_metric_is_exported(exported: Any, where: str, expression: str) -> None:
    asked = list(series(expression))
    assert asked or "up{" in expression, f"{where} asks for nothing of ours"
    for name, labels in asked:
        assert any(name == sample and labels.items() <= have.items() for sample, have in exported[1]), (
            f"{where}: no daemon exports {name} {labels}"
        )


def test_every_alert_has_a_runbook() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names) >= 10
    for alert in alerts():
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert set(alert["annotations"]) == {"summary", "runbook"}
        assert len(alert["annotations"]["runbook"]) > 60, alert["alert"]


def test_grafana_accepts_the_dashboard() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert (dashboard["uid"], dashboard["title"]) == ("kvcache", "KV cache")
    every = dashboard["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies upon another panel"
        taken |= cells
    for panel in panels():
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance", "namespace"}
