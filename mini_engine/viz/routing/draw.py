"""Picture of rules that send requests to workers: what they find, how long requests wait, how long queues become."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_engine.viz.figure import Figure, canvas, label_log_axis, legend_below, line_look, one_by_one, style

Report = Mapping[str, Any]  # the last line of ``mini-engine bench route``
VALUES = {  # field of a row -> what the panel shows, and by how much the field is multiplied
    "hit_rate": ("tokens found (%)", 100),
    "ttft_p99": ("p99 TTFT (ms)", 1000),
    "longest_queue": ("longest queue", 1),
}
HEIGHT = 2.9  # inches of a load


@style()
def route_chart(report: Report) -> Figure:
    """Draw three panels for each load of ``report``: values over the number of workers, with a line for each rule."""
    rows = report["rows"]
    loads, rules = (list(dict.fromkeys(row[field] for row in rows)) for field in ("load", "rule"))
    figure = canvas(HEIGHT * len(loads) + 0.8)
    panels = figure.subplots(len(loads), len(VALUES), squeeze=False)
    for load, line in zip(loads, panels, strict=True):
        for axes, (field, (name, scale)) in zip(line, VALUES.items(), strict=True):
            for number, rule in enumerate(rules):
                own = [row for row in rows if (row["load"], row["rule"]) == (load, rule)]
                counts = [row["workers"] for row in own]
                values = [row[field] * scale for row in own]
                axes.plot(counts, values, label=rule, markersize=5, **line_look(number))
            axes.set(xscale="log", xlabel="workers", title=f"{load}: {name}")
            axes.set_xticks(counts[::2], [str(count) for count in counts[::2]], minor=False)
            axes.set_xticks([], minor=True)
            axes.grid(axis="y")
            if field == "hit_rate":
                axes.set_ylim(0, 100)
            else:
                axes.set_yscale("log")
                label_log_axis(axes.yaxis, "{x:,.0f}")
    handles = panels[0][0].get_lines()
    legend_below(figure, *handles, ncols=len(rules))
    figure.suptitle("Simulated: where requests go, and what that costs", x=0.01, ha="left")
    return Figure(figure, route_summary(rows, loads, report["costs"]))


def route_summary(rows: Sequence[Mapping[str, Any]], loads: Sequence[str], costs: Mapping[str, float]) -> str:
    """Say what each rule found with the most workers, and with which costs of a step this was simulated."""
    most = max(row["workers"] for row in rows)
    parts = ["Rules that send requests to workers, simulated: tokens found in caches, times to first tokens, queues."]
    for load in loads:
        last = [row for row in rows if (row["load"], row["workers"]) == (load, most)]
        parts.append(one_by_one(f"Found by {most} workers, {load}", {r["rule"]: f"{r['hit_rate']:.0%}" for r in last}))
        parts.append(one_by_one("Longest queue", {row["rule"]: row["longest_queue"] for row in last}))
    step, token, row = (costs[name] * 1e6 for name in ("step", "token", "row"))
    parts.append(f"A step takes {step:.0f} us, {token:.1f} us for a prompt token and {row:.0f} us for a row.")
    return " ".join(parts)
