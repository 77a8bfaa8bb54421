"""``memory.html``: what the timeline says, drawn."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

from primus_ext.cluster_data import load_cluster
from primus_ext.project.compose import project
from primus_ext.project.result import LiveAllocations, Projection, Timeline
from primus_ext.report import memory_page
from tests.synthetic import Job, plan, traces

GIB = 2**30


class Tags(HTMLParser):
    """Open tags in order; void and unclosed ones aside, everything is closed again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.depth: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "html", "rect", "line"):
            self.depth.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "h1", "h3", "details", "summary", "table", "tr", "td", "th", "svg", "text",
                   "polygon", "title", "style", "span"):  # fmt: skip
            assert self.depth.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def projection() -> Projection:
    job = Job(tp=8, pp=2, dp=4)
    found = project(plan(job), traces(job), load_cluster("h100", 8, 8), mode="simulate")
    columns = ("position", "static", "activations", "temporaries", "communication")
    line = Timeline(
        columns=columns, points=((0.5, 8 * GIB, 0, 0, 0), (1.0, 8 * GIB, 2 * GIB, GIB, 0)),
        pieces=("forward 0", "back<ward 0"),
    )  # fmt: skip
    top = LiveAllocations(module="a<b", op="aten.mm", phase="forward", bytes=GIB // 2, count=4)
    roles = tuple(
        dataclasses.replace(
            role, timeline=line, top_allocations=(top,), peak_bytes=11 * GIB,
            allocated_bytes=11 * GIB, allocator_bytes=12 * GIB, reserved_bytes=13 * GIB,
        )
        for role in found.memory.per_role
    )  # fmt: skip
    return dataclasses.replace(found, memory=dataclasses.replace(found.memory, per_role=roles))


def test_the_page_holds_together_and_says_what_it_knows(tmp_path: Path) -> None:
    path = memory_page.write(projection(), tmp_path)
    assert path is not None
    tags = Tags()
    tags.feed(path.read_text())
    assert not tags.depth
    text = " ".join(tags.words)
    for words in ("a<b", "back<ward 0", "2.00 GiB", "512.0 MiB", "communicator tp", "12.00 GiB"):
        assert words in text
    opened = [attrs for tag, attrs in tags.seen if tag == "details" and "open" in attrs]
    assert len(opened) == 1


def test_the_areas_are_to_scale() -> None:
    page = memory_page.page(projection())
    areas = re.findall(r"<polygon points='([^']*)'", page)[:4]
    heights = []
    for area in areas:
        corners = [tuple(map(float, c.split(","))) for c in area.split()]
        heights.append(corners[2][1] - corners[1][1])  # at the second moment
    static, activations, communication, temporaries = heights
    assert communication == 0
    assert abs(static / activations - 4) < 0.05 and abs(activations / temporaries - 2) < 0.05


def test_without_timelines_there_is_no_page(tmp_path: Path) -> None:
    job = Job(tp=8)
    found = project(plan(job), traces(job), load_cluster("h100", 1, 8), mode="simulate")
    assert memory_page.write(found, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
