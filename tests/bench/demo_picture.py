"""Run the demo with random weights and draw what it measured, for README.md.

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

from kvcache_server.commands.demo import PROMPT_TOKENS, Demo, Row, table

WIDTH, LABELS, BAR, GAP = 760, 310, 22, 8
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 16px }
.computed { fill: #8c959f } .loaded { fill: #1a7f37 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .computed { fill: #6e7681 } .loaded { fill: #3fb950 } }
"""


def bars(row: Row) -> Iterator[tuple[str, float, str]]:
    """Yield (label, seconds per prompt, class) for the three passes over the prompts of one engine."""
    yield f"engine {row.engine}, nothing cached", row.cold.seconds, "computed"
    yield f"engine {row.other}, from the shared cache", row.elsewhere.seconds, "loaded"
    yield f"engine {row.engine} again, from the shared cache", row.again.seconds, "loaded"


def draw(rows: list[Row]) -> str:
    """Return an SVG image with a group of bars for each row; the bars share one scale."""
    longest = max(row.cold.seconds for row in rows)
    title = f"Seconds to answer a prompt of {PROMPT_TOKENS:,} tokens: two vLLM engines on {os.cpu_count()} CPU cores"
    body, y = [f'<text class="title" x="0" y="18">{title}</text>'], 40
    for row in rows:
        for label, seconds, kind in bars(row):
            width = max(1.0, (WIDTH - LABELS - 130) * seconds / longest)
            faster = "" if kind == "computed" else f" ({row.cold.seconds / seconds:.1f}x faster)"
            body += [
                f'<text x="0" y="{y + 16}">{escape(label)}</text>',
                f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3"/>',
                f'<text x="{LABELS + width + 8:.0f}" y="{y + 16}">{seconds:.2f} s{faster}</text>',
            ]
            y += BAR + GAP
        y += 2 * GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *body, "</svg>", ""])


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvdemo-") as folder, contextlib.ExitStack() as stack:
        rows = Demo(stack, Path(folder)).share()
    print(table(rows))
    out.write_text(draw(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
