"""Run the demo and draw what it measured, for README.md.

    python tests/bench/demo_picture.py OUT.svg

`make picture` calls it. It needs vLLM for CPU and takes as long as `make demo`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

from kvcache_tools.demo import Answer, Demo, answer_table, readable

WIDTH, INDENT, LABELS, BAR, GAP = 760, 20, 270, 22, 8
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 16px }
.computed { fill: #8c959f } .loaded { fill: #1a7f37 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .computed { fill: #6e7681 } .loaded { fill: #3fb950 } }
"""


def bars(answer: Answer) -> Iterator[tuple[str, float, str]]:
    """Yield (label, seconds, class) for the two engines."""
    yield "engine A, without a cache", answer.cold.first, "computed"
    yield "engine B, from the shared cache", answer.cached.first, "loaded"


def draw(answers: list[Answer]) -> str:
    """Return an SVG image with two bars for each answer; the bars share one scale."""
    longest = max(answer.cold.first for answer in answers)
    tokens = max(answer.loaded for answer in answers)
    title = (
        f"Seconds until an answer about {tokens:,} tokens of text begins: two vLLM engines, {os.cpu_count()} CPU cores"
    )
    body, y = [f'<text class="title" x="0" y="18">{title}</text>'], 50
    for answer in answers:
        body.append(f'<text x="0" y="{y + 8}">{escape(answer.question)}</text>')
        y += BAR
        for label, seconds, kind in bars(answer):
            width = max(1.0, (WIDTH - LABELS - 130) * seconds / longest)
            faster = "" if kind == "computed" else f" ({answer.cold.first / seconds:.1f}x faster)"
            body += [
                f'<text x="{INDENT}" y="{y + 16}">{label}</text>',
                f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3"/>',
                f'<text x="{LABELS + width + 8:.0f}" y="{y + 16}">{seconds:.2f} s{faster}</text>',
            ]
            y += BAR + GAP
        y += 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *body, "</svg>", ""])


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvdemo-") as folder, contextlib.ExitStack() as stack:
        found = readable()
        if found is None:
            sys.exit(1)
        answers = Demo(stack, Path(folder)).ask(*found)
    print(answer_table(answers))
    out.write_text(draw(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
