"""What labs/monitoring/ watches, in the pages, from the files themselves.

```{metric-names}          the metrics of book/metrics.yml, with the versions that have each
```
```{gone-metric-names}     names that no page has any more, and what took their place
```
```{alerts}                a section for each alert of rules.yml: what it means and when it fires
```
```{dashboard}             the panels of dashboard.json, in their order
```
"""

import json
import re

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from record_pages import ROOT, table

METRICS = ROOT / "book" / "metrics.yml"
RULES = ROOT / "labs" / "monitoring" / "rules.yml"
DASHBOARD = ROOT / "labs" / "monitoring" / "dashboard.json"
# What is code in the plain text that Prometheus and Grafana show.
CODE = re.compile(r"(--[a-z][\w-]*(?: fp8)?|vllm:\w+|memlab doctor \w+\.log|/metrics)")


def versions(metric: dict) -> str:
    found = metric["in"]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def named(metric: dict, more: str = "") -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.literal(metric["name"], metric["name"]), nodes.Text(more))


def in_code(text: str) -> nodes.paragraph:
    """Plain text with its flags and names set as code."""
    parts = CODE.split(text)
    return nodes.paragraph("", "", *(nodes.literal(p, p) if n % 2 else nodes.Text(p) for n, p in enumerate(parts) if p))


class FromFile(SphinxDirective):
    def read(self, path):
        self.env.note_dependency(str(path))
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)

    def marked(self, text: str) -> nodes.paragraph:
        inline, messages = self.parse_inline(text, lineno=self.lineno)
        return nodes.paragraph("", "", *inline, *messages)


class MetricNames(FromFile):
    def run(self):
        rows = []
        for metric in self.read(METRICS)["metrics"]:
            needs = f" Needs `{metric['needs']}`." if "needs" in metric else ""
            told = nodes.container("", self.marked(metric["says"] + needs), self.marked(metric["do"]))
            rows.append((named(metric, f" {metric['type']}, {versions(metric)}"), told))
        return [table(("metric, its type, the versions that have it", "what it says, and what to do"), rows)]


class GoneMetricNames(FromFile):
    def run(self):
        rows = []
        for metric in self.read(METRICS)["gone"]:
            now = self.marked(metric["now"])
            number = metric["source"].rsplit("/", 1)[1]
            now += [nodes.Text(" ("), nodes.reference("", f"#{number}", refuri=metric["source"]), nodes.Text(")")]
            rows.append((named(metric), now))
        return [table(("old name", "now, and the change that removed it"), rows)]


class Alerts(FromFile):
    def run(self):
        alerts = [rule for group in self.read(RULES)["groups"] for rule in group["rules"] if "alert" in rule]
        return [self.section(alert) for alert in alerts]

    @staticmethod
    def section(alert: dict) -> nodes.section:
        title = nodes.title("", alert["alert"])
        section = nodes.section("", title, ids=[nodes.make_id(alert["alert"])], classes=["memlab-alert"])
        section += in_code(alert["annotations"]["description"])
        section += nodes.literal_block(alert["expr"], alert["expr"], language="text")
        section += nodes.paragraph(
            "", f"It fires when this has held for {alert['for']}: {alert['labels']['severity']}."
        )
        return section


class Dashboard(FromFile):
    def run(self):
        panels = [panel for panel in self.read(DASHBOARD)["panels"] if panel["type"] != "row"]
        return [
            table(("panel", "what it tells"), [(panel["title"], in_code(panel["description"])) for panel in panels])
        ]


def setup(app):
    app.setup_extension("record_pages")
    app.add_directive("metric-names", MetricNames)
    app.add_directive("gone-metric-names", GoneMetricNames)
    app.add_directive("alerts", Alerts)
    app.add_directive("dashboard", Dashboard)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
