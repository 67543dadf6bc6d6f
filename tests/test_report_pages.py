"""The two files of a report: whole, self-contained, escaped, and the same in what they say.

The page is read with html.parser: ids are unique, references are kept, pictures have alternative texts and no colours
of their own, and nothing is asked of a network.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from report_helpers import DATA

from shardops import report
from shardops.report import plots, render, svg
from shardops.report.records import Spread

NASTY = '<script>alert("1")</script> | $x_1$ & *y*_z_ `c` [l](http://example.org)'
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, the text outside of style, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.drawn: list[str] = []  # those in pictures
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> in {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
            if "svg" in self.open:
                self.drawn.append(data)

    def of(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    def values(self, key: str) -> list[str]:
        return [attributes[key] for _, attributes in self.elements if key in attributes]


def nasty(data: Any) -> Any:
    """The data with every contender of torch's and the CPU under a name that means something to both formats."""
    for benchmark in data["benchmarks"]:
        for record in benchmark["extra_info"]["measurements"]:
            if record["contender"] == "torch foreach":
                record["contender"] = NASTY
    data["machine_info"]["shardops"]["cpu"] = NASTY
    data["machine_info"]["shardops"]["missing"] = {NASTY: f"{NASTY}\nand a second line"}
    return data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A report of all that there is: both kinds of files, a comparison, foreign names."""
    root = tmp_path_factory.mktemp("report")
    bench = json.loads((DATA / "bench.json").read_text())
    (root / "before").mkdir()
    (root / "before/bench.json").write_text(json.dumps(bench))
    for benchmark in bench["benchmarks"]:
        for record in benchmark["extra_info"]["measurements"]:
            if record["kind"] == "ours":
                factor = 2.0 if record["numel"] == 80000 else 1.5
                record["seconds"] = [factor * value for value in record["seconds"]]
                record["speed_over_stock"] /= factor
    (root / "now").mkdir()
    (root / "now/bench.json").write_text(json.dumps(nasty(bench)))
    session = json.loads((DATA / "gpu_session.json").read_text())
    session["options"]["dry_run"] = False
    session["machine"]["device"] = "Some GPU"
    peak = {"case": "fp32", "backend": "cpp", "elements": 10**8, "resident": 1_600_000_000, "peak": 1_616_000_000}
    session["parts"]["bandwidth"]["units"][0]["info"] = {"peak": [peak]}
    (root / "now/gpu_session.json").write_text(json.dumps(session))
    (root / "now/other.json").write_text("{}")
    paths = report.write(report.read(root / "now"), root / "out", report.read(root / "before"))
    page, text = (path.read_text() for path in paths)
    return page, text


@pytest.fixture(scope="module")
def page(written: tuple[str, str]) -> Page:
    return Page(written[0])


# ---- the page --------------------------------------------------------------------------------------------------------


def test_tags_are_closed_and_ids_are_unique(page: Page) -> None:
    assert page.wrong == []
    assert page.open == []
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert len(ids) > 20


def test_references_are_kept(page: Page) -> None:
    ids = set(page.values("id"))
    links = [value.removeprefix("#") for value in page.values("href")]
    inside = [
        name
        for _, attributes in page.elements
        for v in attributes.values()
        for name in re.findall(r"url\(#([^)]+)\)", v)
    ]
    assert links
    assert inside
    assert set(links) | set(inside) <= ids


def test_nothing_is_asked_of_a_network(written: tuple[str, str], page: Page) -> None:
    assert page.of("script", "link", "img", "iframe", "image", "object") == []
    assert page.values("src") == []
    assert all(value.startswith("#") for value in page.values("href"))
    assert re.findall(r"url\((?!#)|@import", written[0]) == []
    assert [value for value in page.values("content") if "default-src 'none'" in value]
    # Only as a text, in the name that a file gave.
    assert "http" not in written[0].replace("http://example.org", "").replace("http-equiv", "")
    assert not [
        value
        for _, attributes in page.elements
        for value in attributes.values()
        if "://" in value and "example.org" not in value
    ]


def test_pictures_say_what_they_show(page: Page) -> None:
    pictures = page.of("svg")
    # Over stock: 2 primitives on the CPU, 3 on the GPU. Changes: 2. Bandwidth: two cases on the CPU, one on the GPU.
    assert len(pictures) == 5 + 2 + 3
    assert all(attributes["role"] == "img" for attributes in pictures)
    texts = [attributes["aria-label"] for attributes in pictures]
    assert len(set(texts)) == len(texts)
    assert len([text for text in texts if "speed over stock torch, a row for each case" in text]) == 5
    (first,) = [
        text for text in texts if text.startswith("sharded_adam, fp32, 1 tensor: GB/s against the number of elements")
    ]
    assert "of shardops cpp, torch fused, " in first
    assert first.endswith("at 0.83 times the speed of torch fused.")
    (change,) = [text for text in texts if text.startswith("sharded_adam: speed now over speed before")]
    assert (
        "6 of 6 figures became slower beyond the spread, the most shardops cpp at 0.50 (fp32, 1 tensor, 80k elements)"
        in change
    )


def test_colours_are_the_pages(written: tuple[str, str]) -> None:
    style, body = written[0].split("</style>", 1)
    used = set(re.findall(r"var\((--[\w-]+)\)", written[0]))
    light, dark = style.split("prefers-color-scheme: dark", 1)
    assert {"--ink", "--soft", "--series-0", "--series-1"} <= used
    for scheme in (light, dark):
        assert used | set(svg.VARIABLES.values()) <= set(re.findall(r"(--[\w-]+):", scheme))
    # What matplotlib draws by itself would be black or white on either ground.
    assert re.findall(r"(?:fill|stroke): ?#\w+", body) == []


def test_the_sections(page: Page) -> None:
    ids = page.values("id")
    for anchor in (
        "overview",
        "compared",
        "sharded_adam-0",
        "grad_norm-0",
        "update_path-1",
        "bytes",
        "memory",
        "missing",
    ):
        assert anchor in ids, anchor
    text = " ".join("".join(page.texts).split())
    for said in (
        "7 figures of shardops became slower than in",
        "figures are of fewer than three passes",
        "The two runs are of different hardware",
        "Some GPU",
        "▼ slower",
        "apex.optimizers cannot be imported",
        "other.json: neither pytest-benchmark's JSON nor a GPU session's",
        "28.000",
        "1.010",
        "revision 0000000",
        "2026-11-01",
    ):
        assert said in text, said


def test_foreign_names_are_texts(written: tuple[str, str], page: Page) -> None:
    assert page.of("script") == []
    assert NASTY in page.drawn  # in a legend, no formula
    text = "".join(page.texts)
    assert text.count(NASTY) - page.drawn.count(NASTY) >= 3  # the machine, a table, what is missing


def test_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        paths = report.write(report.read(DATA / "bench.json"), tmp_path / name)
        contents.append([path.read_text() for path in paths])
    assert contents[0] == contents[1]


def test_a_run_without_anything_to_compare(tmp_path: Path) -> None:
    """One size, no stock: neither pictures nor speeds, and still a report."""
    data = json.loads((DATA / "bench.json").read_text())
    data["benchmarks"] = data["benchmarks"][:1]
    measurements = data["benchmarks"][0]["extra_info"]["measurements"]
    data["benchmarks"][0]["extra_info"]["measurements"] = [r for r in measurements if r["kind"] == "ours"]
    measurements[1]["speed_over_stock"] = None
    (tmp_path / "a.json").write_text(json.dumps(data))
    html, markdown = report.write(report.read(tmp_path), tmp_path)
    found = Page(html.read_text())
    assert found.of("svg") == []
    assert "overview" not in found.values("id")
    assert "3.20 µs" in "".join(found.texts)
    assert "3.20 µs" in markdown.read_text()


def test_what_is_missing_is_said_once(tmp_path: Path) -> None:
    """Of two files with the same reason and one with another."""
    data = json.loads((DATA / "bench.json").read_text())
    for name, reason in (("a", "no compiler"), ("b", "no compiler"), ("c", "no room")):
        data["machine_info"]["shardops"]["missing"] = {"DeepSpeedCPUAdam": reason}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    _, markdown = report.write(report.read(tmp_path), tmp_path)
    assert "| DeepSpeedCPUAdam | no compiler; no room |" in markdown.read_text()


def test_no_measurement_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no measurement"):
        report.write(report.read(tmp_path), tmp_path)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_two_pictures_share_no_id() -> None:
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    drawn = f'<svg {spaces} width="9pt" viewBox="0 0 9 9">'
    drawn += '<metadata>x</metadata><g id="figure_1" clip-path="url(#c)"><defs><path id="m" d="M 0 0"/></defs>'
    drawn += '<clipPath id="c"/><use xlink:href="#m" style="fill: #010101"/></g></svg>'
    found = svg.inline(drawn, "one", 'says "this" & <that>')
    assert found.startswith("<svg ")
    page = Page(found)
    assert page.of("svg") == [{"viewbox": "0 0 9 9", "role": "img", "aria-label": 'says "this" & <that>'}]
    assert sorted(page.values("id")) == ["one-c", "one-m"]
    assert page.of("g") == [{"clip-path": "url(#one-c)"}]
    assert page.of("use") == [{"href": "#one-m", "style": "fill: var(--ink)"}]
    assert page.of("metadata") == []


def test_contenders_look_different_without_colours() -> None:
    kinds = {"a": "ours", "b": "ours", **{f"t{i}": "torch" for i in range(7)}, "p": "peer", "l": "limit"}
    styles = plots.styles_of(kinds)
    looks = {(style.marker, str(style.dash)) for style in styles.values()}
    assert len(looks) == len(kinds)
    assert styles["a"].color != styles["b"].color
    assert styles["l"].color == svg.INK


def test_points_stand_where_their_figures_are() -> None:
    run = report.read(DATA / "bench.json")
    members = [m for m in run.measurements if m.tensors == 1 and m.case == "fp32" and m.primitive == "sharded_adam"]
    styles = plots.styles_of({m.contender: m.kind for m in members})
    page = Page(plots.bandwidth(members, styles, "name", "text"))

    def heights(contender: str) -> list[float]:
        """From the top, of the three sizes; the legend's marker comes after them."""
        color = f"fill: var({svg.VARIABLES[styles[contender].color]})"
        return [float(a["y"]) for a in page.of("use") if color in a.get("style", "")][:3]

    ours, fused, foreach = (heights(name) for name in ("shardops cpp", "torch fused", "torch foreach"))
    assert max(ours) - min(ours) < 0.01  # 70 GB/s at all three sizes
    assert ours[0] < fused[0] < foreach[0]
    # 70, 56.9 and 17.5 GB/s on an axis that is linear.
    rates = [
        m.gb_s or 0 for name in ("shardops cpp", "torch fused", "torch foreach") for m in members if m.contender == name
    ][::3]
    assert (fused[0] - ours[0]) / (foreach[0] - ours[0]) == pytest.approx(
        (rates[0] - rates[1]) / (rates[0] - rates[2]), rel=1e-3
    )
    assert {"same-streams limit", "GB/s", "elements"} <= set(page.texts)


def test_whiskers_reach_the_quartiles() -> None:
    assert plots._whiskers([(2.0, Spread(1.5, 2.0, 4.0)), (1.0, None)]) == [[0.5, 0.0], [2.0, 0.0]]
    assert plots._whiskers([(2.0, Spread(2.5, 3.0, 4.0))]) == [[0.0], [2.0]]  # never of a negative length


# ---- Markdown --------------------------------------------------------------------------------------------------------


def test_markdown_has_the_pages_tables(written: tuple[str, str], page: Page) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(written[1])
    tables = [token for token in tokens if token.type == "table_open"]
    # The page has the figures of both runs besides.
    assert len(tables) == len(page.of("table")) - 1
    texts = [child.content for token in tokens for child in token.children or [] if child.type == "text"]
    whole = "".join(texts)
    assert whole.count(NASTY.replace("http://example.org", "")[:40]) >= 3
    kinds = {child.type for token in tokens for child in token.children or []}
    assert kinds <= {"text", "softbreak", "strong_open", "strong_close"}, kinds
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[0] == "shardops: benchmarks"
    assert "Memory" in headings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sharded_adam", "sharded_adam"),
        ("torch._foreach_copy_", r"torch.\_foreach_copy\_"),
        ("a | b\nc", r"a \| b c"),
        ("<b> & *x*", r"&lt;b&gt; &amp; \*x\*"),
        ("[l](u) `c` ~1", r"\[l\](u) \`c\` \~1"),
    ],
)
def test_markdown_escapes(text: str, expected: str) -> None:
    assert render.markdown(text) == expected
    (inline,) = [token for token in MarkdownIt().parse(render.markdown(text)) if token.type == "inline"]
    shown = "".join(child.content for child in inline.children or [])
    assert shown == " ".join(text.split())
