"""Grafana dashboards as code: writes helm/monitoring/dashboards/*.json. `--check` fails when they are not what this would write.

A panel is a title, a unit and its queries; a dashboard is rows of panels. Everything is filtered by the variable `namespace`,
which is a run on a cluster (one run, one namespace) and empty on a laptop. Queries are tried on a real Prometheus by
tests/monitoring.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

FOLDER = Path(__file__).parent.parent / "helm" / "monitoring" / "dashboards"
N = '{namespace=~"$namespace"}'


@dataclass(frozen=True)
class Panel:
    """`queries`: legend -> expression. `kind`: timeseries, stat or heatmap. `span`: of a trace, which its points link to."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    tells: str = ""
    span: str = ""


def rate(metric: str, by: str = "", of: str = "") -> str:
    """Per second over five minutes, summed by a label."""
    selector = f'{{namespace=~"$namespace"{", " + of if of else ""}}}'
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{selector}[5m]))"


def most(metric: str, by: str = "") -> str:
    return f"max{f' by ({by})' if by else ''} ({metric}{N})"


def quantile(share: float, metric: str, by: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{N}[5m])))"


def mean(metric: str) -> str:
    return f"sum (rate({metric}_sum{N}[5m])) / sum (rate({metric}_count{N}[5m]))"


T, B, R, W = "slipstream_trainer_", "slipstream_buffer_", "slipstream_rollout_", "slipstream_reward_"

RUN = {
    "Is it learning?": [
        Panel("reward", {"mean of a batch": most(f"{T}reward_mean")}),
        Panel("step", {"trained": most(f"{T}step"), "checkpoint": most(f"{T}checkpoint_step"),
                       "published": most(f"{B}published_step")}),
        Panel("entropy", {"nats": most(f"{T}entropy")}),
        Panel("alarms", {"{{name}}": most("slipstream_alarm", "name")}, tells="1 while a figure is outside of its band"),
    ],
    "Can it be trusted?": [
        Panel("lag of trained tokens", {"mean": most(f"{T}lag_mean"), "max": most(f"{T}lag_max"), "bound": most(f"{B}max_lag")},
              tells="steps between sampling and training"),
        Panel("log-probability gap", {"fresh tokens": most(f"{T}numeric_gap_mean"), "stale tokens": most(f"{T}staleness_gap_mean")},
              tells="|trainer - sampler| in nats; of fresh tokens it is the implementations alone"),
        Panel("effective sample size", {"share": most(f"{T}ess")}, "percentunit"),
        Panel("clipped tokens", {"share": most(f"{T}clip_share")}, "percentunit"),
        Panel("gradient norm", {"before clipping": most(f"{T}grad_norm")}),
        Panel("experts", {"busiest over mean": most(f"{T}expert_load_max"), "flipped routes": most(f"{T}route_flip_share")}),
    ],
    "Does it get on?": [
        Panel("tokens per second", {"generated": rate(f"{R}generated_tokens_total"), "trained": rate(f"{T}trained_tokens_total")}),
        Panel("a step's time", {"training": mean(f"{T}step_seconds"), "waiting for its batch": mean(f"{T}wait_seconds")}, "s"),
        Panel("stalled processes", {"{{pod}}{{instance}}": most("slipstream_stalled", "pod, instance")}),
        Panel("longest waits now", {"{{for_}}": f"topk(5, max by (for_) (slipstream_waiting_seconds{N}))"}, "s"),
        Panel("groups dropped, by reason", {"{{reason}}": rate(f"{B}groups_dropped_total", "reason")}, "cps"),
        Panel("draws not accounted for", {"imbalance": most(f"{B}imbalance")}, kind="stat", tells="0, or a bug"),
    ],
}
SERVICES = {
    "buffer": [
        Panel("wanted and held", {"wanted samples": most(f"{B}wanted_samples"), "leases: {{kind}}": most(f"{B}leases", "kind"),
                                  "unscored": most(f"{B}unscored_samples")}),
        Panel("groups", {"open": most(f"{B}open_draws"), "complete": most(f"{B}complete_groups"),
                         "outstanding": most(f"{B}outstanding_groups")}),
        Panel("bytes", {"held": most(f"{B}bytes"), "quota": most(f"{B}quota_bytes")}, "bytes"),
        Panel("ledger operation, p99", {"{{operation}}": quantile(0.99, f"{B}ledger_seconds", "operation")}, "s"),
        Panel("leases granted again", {"{{kind}}": rate(f"{B}leases_expired_total", "kind")}, "cps"),
        Panel("refused items", {"{{reason}}": rate(f"{B}rejected_total", "reason")}, "cps"),
    ],
    "rollout": [
        Panel("slots", {"in use": f"sum ({R}active_slots{N})", "all": f"sum ({R}slots{N})", "queued": f"sum ({R}engine_waiting{N})"}),
        Panel("KV cache in use", {"{{pod}}{{instance}}": most(f"{R}kv_cache_share", "pod, instance")}, "percentunit"),
        Panel("guessed tokens", {"judged": rate(f"{R}draft_tokens_total"), "accepted": rate(f"{R}accepted_tokens_total")}, "cps",
              tells="rollout.speculation; 0 without"),
        Panel("tokens of a step with a guess", {
            "mean": f"1 + {rate(f'{R}accepted_tokens_total')} / clamp_min({rate(f'{R}drafts_total')}, 1e-9)"},
            tells="its own draw and the guesses accepted before it; what a guess has to earn is in docs/guides/engines.md"),
        Panel("swaps", {"{{outcome}}": rate(f"{R}swaps_total", "outcome")}, "cps"),
        Panel("pause of a swap", {"p50": quantile(0.5, f"{R}swap_seconds"), "p99": quantile(0.99, f"{R}swap_seconds")}, "s"),
        Panel("episodes", {"{{outcome}}": rate(f"{R}episodes_total", "outcome")}, "cps"),
        Panel("environment calls, p99", {"{{call}}": quantile(0.99, f"{R}environment_seconds", "call")}, "s"),
    ],
    "reward": [
        Panel("scores", {"{{outcome}}": rate(f"{W}scores_total", "outcome")}, "cps"),
        Panel("a scorer's call, p99", {"{{scorer}}": quantile(0.99, f"{W}score_seconds", "scorer")}, "s"),
    ],
    "trainer": [
        Panel("publication and checkpoint", {"publish": mean(f"{T}publish_seconds"), "checkpoint": mean(f"{T}checkpoint_seconds")},
              "s"),
        Panel("starts", {"incarnation": most(f"{B}incarnation")}, tells="grows by one with each start"),
        Panel("skipped steps", {"per hour": f"sum (increase({T}skipped_steps_total{N}[1h]))"}),
        Panel("learning rate", {"now": most(f"{T}learning_rate")}),
    ],
    "all": [
        Panel("spans of traces", {"{{outcome}}": rate("slipstream_trace_spans_total", "outcome")}, "cps",
              tells="where the run file names a collector; anything but exported was lost"),
        Panel("calls, p99", {"{{method}}": f"topk(10, {quantile(0.99, 'slipstream_rpc_seconds', 'method')})"}, "s"),
        Panel("versions that run", {"{{service}} {{version}}": f"count by (service, version) (slipstream_build_info{N})"}),
    ],
}
SAMPLE = {
    "A sample's life, hop by hop": [
        Panel("1 leased, 2 in generation", {"leases": most(f"{B}leases", "kind"), "slots": f"sum ({R}active_slots{N})"},
              span="generation"),
        Panel("2 submitted", {"{{outcome}}": rate(f"{B}samples_total", "outcome")}, "cps", span="store sample"),
        Panel("3 waiting for a score, scored", {"waiting": most(f"{B}unscored_samples"), "scored per s": rate(f"{W}scores_total")},
              span="scoring"),
        Panel("4 complete, not in a batch", {"groups": most(f"{B}complete_groups")}, span="store score"),
        Panel("4 batches: numbered, trained, committed", {
            "numbered": most(f"{B}numbered_batch"), "trained": most(f"{T}step"), "committed": most(f"{B}committed_batch")},
              span="batch"),
        Panel("5 published, 7 loaded", {"published": most(f"{B}published_step"),
                                        "slowest worker": f"min ({R}loaded_step{N})", "fastest": most(f"{R}loaded_step")},
              span="publish"),
        Panel("6 trained", {"samples per s": rate(f"{T}samples_total"), "groups per s": rate(f"{T}groups_total")}, "cps",
              span="train"),
        Panel("never trained", {"{{reason}}": rate(f"{B}groups_dropped_total", "reason")}, "cps"),
    ],
}
COST = {
    "What a trained token takes": [
        Panel("generated over trained tokens", {
            "ratio": f"{rate(f'{R}generated_tokens_total')} / {rate(f'{T}trained_tokens_total')}"},
            tells="above 1: drops, resampling, work of workers that vanished"),
        Panel("the trainer waits", {"share": f"sum (rate({T}wait_seconds_sum{N}[5m])) / (sum (rate({T}wait_seconds_sum{N}[5m])) + "
                                             f"sum (rate({T}step_seconds_sum{N}[5m])))"}, "percentunit"),
        Panel("slots in use", {"share": f"sum ({R}active_slots{N}) / sum ({R}slots{N})"}, "percentunit"),
        Panel("CPU seconds per million trained tokens", {
            "{{service}}": f"1e6 * sum by (service) (rate(process_cpu_seconds_total{N}[5m]) * on (instance, pod) group_left (service) "
                           f"slipstream_build_info) / on () group_left () {rate(f'{T}trained_tokens_total')}"}, "s"),
        Panel("cost per million trained tokens", {
            "at $hourly per worker-hour": f"$hourly / 3600 * (sum ({B}workers{N}) + 1) / {rate(f'{T}trained_tokens_total')} * 1e6"},
            "currencyUSD", tells="workers and the trainer at one price; set the variable to yours"),
    ],
}
DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]]]] = {
    "run": ("Slipstream: runs", RUN),
    "services": ("Slipstream: services", SERVICES),
    "sample": ("Slipstream: a sample's life", SAMPLE),
    "cost": ("Slipstream: cost per trained token", COST),
}


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard in Grafana's JSON model."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    top = 0
    for row, content in rows.items():
        panels.append({"type": "row", "title": row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}, "id": len(panels) + 1,
                       "collapsed": False, "panels": []})
        top += 1
        for n, panel in enumerate(content):
            panels.append(_panel(panel, len(panels) + 1, {"h": 8, "w": 8, "x": 8 * (n % 3), "y": top + 8 * (n // 3)}))
        top += 8 * -(-len(content) // 3)
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {"name": "namespace", "type": "query", "label": "run", "includeAll": True, "allValue": ".*", "multi": True, "refresh": 2,
         "datasource": {"type": "prometheus", "uid": "${datasource}"},
         "query": {"query": "label_values(slipstream_build_info, namespace)", "refId": "namespace"},
         "current": {"text": "All", "value": "$__all"}}]
    if name == "cost":
        variables.append(_textbox("hourly", "price of a worker-hour", "1"))
    if name == "sample":
        variables += [{"name": "traces", "type": "datasource", "query": "tempo", "label": "traces (Tempo)"},
                      _textbox("samples", "traces of samples where", "span.slipstream.draw >= 0")]
    return {
        "uid": f"slipstream-{name}", "title": title, "tags": ["slipstream"], "schemaVersion": 39, "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"}, "timezone": "browser", "templating": {"list": variables}, "panels": panels,
        "links": [{"type": "dashboards", "tags": ["slipstream"], "title": "Slipstream", "asDropdown": True}]}


def _textbox(name: str, label: str, value: str) -> dict[str, Any]:
    return {"name": name, "type": "textbox", "label": label, "query": value, "current": {"text": value, "value": value}}


def _links(panel: Panel) -> list[dict[str, Any]]:
    """A point's link to the spans of that time, in Grafana's Explore; see docs/guides/tracing.md."""
    if not panel.span:
        return []
    query = {"refId": "A", "datasource": {"type": "tempo", "uid": "${traces}"}, "queryType": "traceql",
             "query": f'{{ name = "{panel.span}" && ${{samples:percentencode}} }}'}
    panes = {"traces": {"datasource": "${traces}", "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}}
    text = json.dumps(panes, separators=(",", ":"))
    url = f"/explore?schemaVersion=1&panes={quote(text, safe='${}_:')}"
    return [{"title": f"traces: {panel.span}", "url": url, "targetBlank": True}]


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.tells, "gridPos": place, "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0 if panel.unit in ("s", "bytes", "cps") else None,
                                     **({"links": links} if (links := _links(panel)) else {})}, "overrides": []},
        "targets": [
            {"refId": chr(65 + n), "expr": expression, "legendFormat": legend, "datasource": source}
            for n, (legend, expression) in enumerate(panel.queries.items())]}


def main() -> int:
    """Write, or compare with --check."""
    different = []
    for name in DASHBOARDS:
        path, text = FOLDER / f"{name}.json", json.dumps(dashboard(name), indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            different.append(path.name)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if different and "--check" in sys.argv:
        print(f"not what tools/generate_dashboards.py writes: {', '.join(different)}; run it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
