"""``memory.html``: bytes over a step and what is live at its highest moment, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from primus_ext import whole_file
from primus_ext.project.result import Projection, RoleMemory, Timeline
from primus_ext.report.units import gib

MEMORY_FILE = "memory.html"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 260, 70, 20
# part of a timeline -> colour, label; the lowest first
_COLOURS = {
    "static": ("#4878a8", "parameters, gradients, optimizer, workspaces"),
    "activations": ("#5a9e6f", "activations"),
    "communication": ("#c85a54", "communication"),
    "temporaries": ("#e0a83c", "temporaries"),
}
_LIVE = ("together", "count", "each", "part or phase", "module", "made by")
_STYLE = """
body{font:14px system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 2em}td,th{padding:.15em .8em;text-align:left}
th{border-bottom:1px solid #999}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#555}summary{cursor:pointer;font-size:16px}
.key span{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#ddd}svg text{fill:#aaa}}
"""


def write(projection: Projection, directory: Path) -> Path | None:
    """Write the page into an existing directory; None where no timeline is known.

    Raises:
        OSError: The directory is missing, not writable or full.
    """
    if all(role.timeline is None for role in projection.memory.per_role):
        return None
    return whole_file.write(directory / MEMORY_FILE, page(projection))


def page(projection: Projection) -> str:
    """The page: every role, the one that needs most opened."""
    memory = projection.memory
    roles = [
        f"<details{' open' if role.role == memory.binding_role else ''}>"
        f"<summary>{escape(role.role)}: {gib(role.reserved_bytes)}</summary>"
        f"{_role(role, memory.capacity_bytes)}</details>"
        for role in memory.per_role
    ]
    title = f"{projection.plan.model.name or 'model'} on {projection.cluster['name']}: memory"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>{escape(memory.verdict)}; {gib(memory.capacity_bytes)} on a device</p>"
        f"{_key()}{''.join(roles)}</html>\n"
    )


def _size(size: int) -> str:
    """Bytes in the unit that shows three digits."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _key() -> str:
    items = (f"<span style='background:{c}'></span>{label}" for c, label in _COLOURS.values())
    return f"<p class=key>{''.join(items)}</p>"


def _role(role: RoleMemory, capacity: int) -> str:
    figures = [("live tensors at the peak", role.peak_bytes)]
    figures += [("allocated, as torch will say", role.allocated_bytes or 0)]
    figures += [("reserved, as torch will say", role.allocator_bytes or 0)]
    figures += [(name, size) for name, size in role.outside.items()]
    figures += [("taken from the device", role.reserved_bytes)]
    chart = "" if role.timeline is None else _chart(role.timeline, role, capacity)
    top = [
        (_size(a.bytes * a.count), str(a.count), _size(a.bytes), a.phase, a.module, a.op)
        for a in role.top_allocations
    ]
    return (
        chart
        + _table(("", "bytes"), [(name, _size(size)) for name, size in figures], numbers=(1,))
        + "<h3>Live at the peak</h3>"
        + _table(_LIVE, top, (0, 1, 2))
    )


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _chart(timeline: Timeline, role: RoleMemory, capacity: int) -> str:
    """Stacked areas; lines for what the allocator reserves and for the device."""
    index = {name: number for number, name in enumerate(timeline.columns)}
    reserved = role.allocator_bytes or role.reserved_bytes
    shown = capacity if capacity < 1.6 * reserved else reserved
    scale = _HEIGHT / (1.05 * shown)
    width = (_WIDTH - _LEFT) / max(1, len(timeline.pieces))
    xs = [_LEFT + point[0] * width for point in timeline.points]
    below = [0.0] * len(xs)
    areas = []
    for name, (colour, label) in _COLOURS.items():
        above = [b + p[index[name]] for b, p in zip(below, timeline.points, strict=True)]
        edge = [f"{x:.1f},{_HEIGHT - y * scale:.1f}" for x, y in zip(xs, above, strict=True)]
        back = [f"{x:.1f},{_HEIGHT - y * scale:.1f}" for x, y in zip(xs, below, strict=True)]
        points = " ".join([*edge, *reversed(back)])
        areas.append(f"<polygon points='{points}' fill='{colour}'><title>{label}</title></polygon>")
        below = above
    lines = [_line(reserved, "reserved", scale)]
    if shown == capacity:
        lines.append(_line(capacity, "device", scale))
    hover = "".join(
        f"<rect x='{_LEFT + i * width:.1f}' y='0' width='{width:.1f}' height='{_HEIGHT}' "
        f"fill='transparent'><title>{escape(name)}</title></rect>"
        for i, name in enumerate(timeline.pieces)
    )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT + _BOTTOM}' role=img aria-label='bytes over a step'>"
        f"{''.join(areas)}{hover}{''.join(lines)}"
        f"<text x='{_LEFT}' y='{_HEIGHT + 15}'>one step, work after work: "
        f"{len(timeline.pieces)} pieces</text></svg>"
    )


def _line(size: int, label: str, scale: float) -> str:
    y = _HEIGHT - size * scale
    return (
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#888' "
        f"stroke-dasharray='4'/><text x='0' y='{y + 4:.1f}'>{label}</text>"
        f"<text x='{_WIDTH}' y='{y - 3:.1f}' text-anchor='end'>{gib(size)}</text>"
    )
