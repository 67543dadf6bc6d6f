"""SVG as a page takes it in: colours that the page decides on, ids of its own, an alternative text.

A page is read in the light and in the dark, so no colour is fixed: drawings are made with stand-ins, and ``inline``
puts CSS variables in their place.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

# Stand-in -> CSS variable. The series' variables hold the colours of Okabe and Ito (2008), in two orders: one that
# reads on white, one on black.
INK, SOFT = "#010101", "#020202"
SERIES = tuple(f"#0405{index:02x}" for index in range(6))
VARIABLES = {INK: "--ink", SOFT: "--soft"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}


def inline(svg: str, name: str, alternative: str) -> str:
    """A picture as a page takes it in: ids of its own, variables for colours, an alternative text, no name spaces.

    Args:
        svg: a file's text.
        name: that its ids begin with; unique in the page.
        alternative: what the picture says.
    """
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                if value in used:
                    element.set("id", f"{name}-{value}")
                continue
            value = re.sub(r"url\(#", f"url(#{name}-", value)
            if key == "href":
                value = f"#{name}-{value.removeprefix('#')}"
            element.set(key, value)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", alternative)
    text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    return re.sub(r"\n\s*", "\n", text)
