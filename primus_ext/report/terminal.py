"""The report that a person sees: verdict first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from primus_ext.project.result import Projection, RoleMemory
from primus_ext.report.measured_table import comparison
from primus_ext.report.schedule_table import schedules
from primus_ext.report.suggestions import heaviest, suggestions
from primus_ext.report.units import count, gib, percent, seconds

_VERDICTS = {
    "fits": ("FITS", "bold green"),
    "at_risk": ("AT RISK", "bold yellow"),
    "oom": ("OUT OF MEMORY", "bold red"),
}
# part of the memory -> letter in the bar, style
_PARTS = {
    "parameters": ("P", "blue"),
    "gradients": ("G", "cyan"),
    "optimizer": ("O", "magenta"),
    "activations": ("A", "green"),
    "temporaries": ("T", "yellow"),
    "communication": ("C", "red"),
    "reserve": ("W", "white"),
}
_OUTSIDE = ("x", "dim")
_MANY_ROLES = 8
_NUMBERS = 64
"""Columns that the time table needs beside its evidence."""
_NARROW = 99
_SEEN = 1e-3
"""Share of a step below which hidden work is not shown."""
_WIDEST = 110
"""Columns beyond which lines of text are hard to read."""


def render(projection: Projection, console: Console) -> None:
    """Print the report.

    Args:
        projection: The answer; the numbers are those of ``projection.json``.
        console: Where to print; without colours it says the same.
    """
    width = min(console.width, _WIDEST)
    console.print(Group(*_parts(projection, width)), width=width)


def _parts(projection: Projection, width: int) -> list[RenderableType]:
    found: list[RenderableType] = [Text(), _headline(projection), _job(projection), Text()]
    found += [_throughput(projection), Text(), *_memory(projection, width), Text()]
    found += [Text("Where the time goes", style="bold"), _time(projection, width)]
    found += _uneven(projection)
    found += comparison(projection)
    found += schedules(projection, width)
    if width <= _NARROW:
        found += _list("Evidence", _evidence(projection), "dim")
    found += _list("Warnings", projection.warnings, "yellow")
    found += _list("Try next", suggestions(projection), "")
    found += _list("Not modelled", projection.not_modelled, "dim")
    return found


def _headline(projection: Projection) -> Text:
    word, style = _VERDICTS[projection.memory.verdict]
    role = heaviest(projection)
    text = Text(f"{word}  ", style=style)
    text.append(
        f"{gib(role.reserved_bytes)} of {gib(projection.memory.capacity_bytes)} on the heaviest "
        "rank, ",
        style="bold",
    )
    return text.append(role.role)


def _job(projection: Projection) -> Text:
    plan, cluster = projection.plan, projection.cluster
    degrees = plan.parallelism
    shape = [("tp", degrees.tp), ("pp", degrees.pp), ("vpp", degrees.vpp), ("cp", degrees.cp),
             ("ep", degrees.ep), ("dp", degrees.dp)]  # fmt: skip
    layout = " ".join(f"{name}={value}" for name, value in shape if value > 1) or "one rank"
    total, active = projection.model["total_parameters"], projection.model["active_parameters"]
    size = count(total) if total == active else f"{count(total)}, {count(active)} active"
    recipe = f" {plan.precision.recipe}" if plan.precision.recipe else ""
    return Text(
        f"{plan.model.name or 'model'} ({size}), {plan.precision.compute}{recipe}, "
        f"seq {plan.batch.seq}, mbs {plan.batch.mbs}, gbs {plan.batch.gbs}; {layout}; "
        f"{cluster['nodes']} x {cluster['gpus_per_node']} {cluster['accelerator']}, "
        f"mode {projection.mode}",
        style="dim",
    )


def _throughput(projection: Projection) -> Text:
    found = projection.throughput
    interval = found.interval
    low, high, level = interval["low"], interval["high"], 100 * interval["level"]
    text = Text("Step ", style="bold").append(seconds(found.step_s), style="bold cyan")
    text.append(f"  ({level:.0f} % interval: {seconds(low)} to {seconds(high)})\n")
    text.append(f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU", style="bold")
    text.append(f",  {found.model_tflops_per_gpu:,.1f} model TFLOP/s/GPU,  MFU ")
    return text.append(percent(found.mfu))


def _uneven(projection: Projection) -> list[RenderableType]:
    """How uneven the experts' load is, and what slow ranks would add, where that was asked."""
    found: list[RenderableType] = []
    experts, slow = projection.expert_imbalance, projection.stragglers
    if experts is not None:
        found += [
            Text(),
            Text("Expert load, busiest rank over the mean", style="bold"),
            Text(
                f"{experts.gating:.2f} in the layers, for which the others wait (at most "
                f"{experts.largest:.2f}); {experts.pooled:.2f} pooled over a step"
            ),
        ]
    if slow is not None:
        found += [
            Text(),
            Text("Stragglers, not in the step", style="bold"),
            Text(
                f"the slowest of {slow.ranks:,} ranks that vary by {percent(slow.rank_cv)} each "
                f"would add {seconds(slow.low_s)} to {seconds(slow.high_s)} "
                f"({100 * slow.level:.0f} % interval)"
            ),
        ]
    return found


def _memory(projection: Projection, width: int) -> list[RenderableType]:
    memory = projection.memory
    roles, left_out = _shown(projection)
    names = max(len(role.role) for role in roles)
    room = max(16, width - min(names, 40) - 22)
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, pad_edge=False)
    table.add_column(max_width=40, overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for role in roles:
        mark = "bold" if role.role == memory.binding_role else ""
        table.add_row(
            Text(role.role, style=mark),
            bar(role, memory.capacity_bytes, room),
            Text(gib(role.reserved_bytes), style=mark),
        )
    title = Text("Memory of one rank", style="bold")
    title.append(f"  (bar: {gib(memory.capacity_bytes)})", style="dim")
    found: list[RenderableType] = [title, table]
    if left_out:
        found.append(Text(f"and {left_out} more stages between these", style="dim"))
    on_host = max(role.host_bytes for role in memory.per_role)
    if on_host:
        found.append(Text(f"and up to {gib(on_host)} of host memory for each rank (offload)"))
    return [*found, _legend(roles)]


def _shown(projection: Projection) -> tuple[list[RoleMemory], int]:
    """All roles if there are few; otherwise the first, the heaviest and the last ones."""
    roles = list(projection.memory.per_role)
    if len(roles) <= _MANY_ROLES:
        return roles, 0
    by_weight = sorted(range(len(roles)), key=lambda i: -roles[i].reserved_bytes)
    kept = sorted({0, 1, len(roles) - 2, len(roles) - 1, *by_weight[:2]})
    return [roles[i] for i in kept], len(roles) - len(kept)


def bar(role: RoleMemory, capacity: int, width: int) -> Text:
    """Parts of a role's memory as letters, one column each ``capacity / width`` bytes.

    What is reserved beyond the tensors is drawn as ``x``; what does not fit ends in ``>``.
    """
    pieces = [(getattr(role.parts, name), *look) for name, look in _PARTS.items()]
    pieces.append((max(0, role.reserved_bytes - role.peak_bytes), *_OUTSIDE))
    text, passed = Text(), 0
    for size, letter, style in pieces:
        start, passed = passed, passed + size
        first, last = round(start / capacity * width), round(passed / capacity * width)
        text.append(letter * (min(last, width) - min(first, width)), style=style)
    if passed > capacity:
        return text.append(">", style="bold red")
    return text.append("." * (width - len(text)), style="dim").append("|", style="dim")


def _legend(roles: Sequence[RoleMemory]) -> Text:
    text = Text(style="dim")
    for name, (letter, style) in _PARTS.items():
        if any(getattr(role.parts, name) for role in roles):
            label = "workspaces" if name == "reserve" else name
            text.append(letter, style=style).append(f" {label}  ")
    return text.append("x allocator, context, communicators")


def _time(projection: Projection, width: int) -> Table:
    step, terms = projection.throughput.step_s, projection.breakdown
    hidden = [max(0.0, term.seconds - term.exposed_seconds) for term in terms]
    hides = max(hidden, default=0.0) > _SEEN * step
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("term", no_wrap=True)
    for name in ("exposed", "share", *(("hidden",) if hides else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("evidence", overflow="fold", style="dim", max_width=max(10, width - _NUMBERS))
    for term, beside in zip(terms, hidden, strict=True):
        cells = [term.term, seconds(term.exposed_seconds), percent(term.exposed_seconds / step)]
        if hides:
            cells.append(seconds(beside) if beside > _SEEN * step else "")
        # a narrow terminal shows here how a term is known, and below what it stands on
        known = term.evidence if width > _NARROW else term.evidence.partition(":")[0]
        table.add_row(*cells, known)
    return table


def _evidence(projection: Projection) -> list[str]:
    """What the terms stand on, terms that share it together."""
    groups: dict[str, list[str]] = {}
    for term in projection.breakdown:
        groups.setdefault(term.evidence, []).append(term.term)
    return [f"{', '.join(terms)}: {evidence}" for evidence, terms in groups.items()]


def _list(title: str, lines: Sequence[str], style: str) -> list[RenderableType]:
    if not lines:
        return []
    found: list[RenderableType] = [Text(), Text(title, style="bold")]
    for line in lines:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_row(Text("-", style=style), Text(line, style=style))
        found.append(Padding(table, (0, 0, 0, 0)))
    return found
