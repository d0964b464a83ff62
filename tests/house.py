"""Draw the packages, their imports, and the tables of states in CONTRIBUTING.md.

    python tests/house.py             update the drawing
    python tests/house.py --check     fail if the drawing is out of date

`make drawing` does the former, `make lint` the latter. An arrow from one package to another means that at least one of
its modules imports one of the other's, for type checkers included. Arrows that follow from others are left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import grimp

from kvcache_server.core.states import TABLES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- drawing: made by `make drawing` -->\n", "<!-- end of drawing -->\n"
BEGIN_STATES, END_STATES = "<!-- states: made by `make drawing` -->\n", "<!-- end of states -->\n"
FOLDERS = {
    "kvcache_server": "server",
    "kvcache_client": "client",
    "kvcache_tools": "server",
    "kvcache_tiers": "client",
    "kvcache_proto": "proto",
}
Arrows = dict[str, set[str]]


def packages(graph: grimp.ImportGraph) -> list[str]:
    """Return the packages to draw: those directly in the server and the client, and the others as one each."""
    inner = [name for root in ("kvcache_server", "kvcache_client") for name in sorted(graph.find_children(root))]
    return [name for name in inner if graph.find_children(name)] + list(FOLDERS)[2:]


def reduced(arrows: Arrows) -> Arrows:
    """Return `arrows` without those that lead where a longer way leads, too. Raises SystemExit if there is a circle."""

    def window_blocks(start: str, way: tuple[str, ...] = ()) -> set[str]:
        if start in way:
            raise SystemExit(f"a circle of imports: {' -> '.join((*way[way.index(start) :], start))}")
        return arrows[start].union(*(window_blocks(after, (*way, start)) for after in arrows[start]))

    beyond = {name: window_blocks(name) for name in arrows}
    return {
        name: {after for after in direct if not any(after in beyond[other] for other in direct)}
        for name, direct in arrows.items()
    }


def purpose(name: str) -> str:
    """Return the first sentence of the package's docstring."""
    folder = ROOT / FOLDERS[name.split(".")[0]] / name.replace(".", "/")
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    if not docstring:
        raise SystemExit(f"{name} has no docstring")
    return " ".join(docstring.split("\n\n")[0].split())


def drawing() -> str:
    """Return a Mermaid flowchart of the packages, and a table of what each is for."""
    graph = grimp.build_graph(*FOLDERS, cache_dir=None)
    names = packages(graph)
    for name in names:
        graph.squash_module(name)
    arrows = {name: graph.find_modules_directly_imported_by(name) & set(names) - {name} for name in names}
    lines = ["```mermaid", "flowchart TD"]
    for root, folder in list(FOLDERS.items())[:2]:
        inside = [name.split(".")[1] for name in names if name.startswith(f"{root}.")]
        lines += [f"  subgraph {folder}", *(f"    {folder}.{name}[{name}]" for name in inside), "  end"]
    short = {name: name.replace("kvcache_", "") for name in names}
    for name, direct in sorted(reduced(arrows).items()):
        lines += [f"  {short[name]} --> {short[after]}" for after in sorted(direct)]
    lines += ["```", "", "| package | purpose |", "| --- | --- |"]
    lines += [f"| `{FOLDERS[name.split('.')[0]]}/{name.replace('.', '/')}` | {purpose(name)} |" for name in names]
    return "\n".join(lines) + "\n"


def states() -> str:
    """Return a table for each of the state machines."""
    lines: list[str] = []
    for name, steps in TABLES.items():
        lines += [f"| {name} state | next state | when |", "| --- | --- | --- |"]
        lines += [f"| {step.before} | {step.after} | {step.when} |" for step in steps]
        lines += [""]
    return "\n".join(lines[:-1]) + "\n"


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """Return `page` with `text` between the two marks."""
    before, rest = page.split(begin)
    return f"{before}{begin}{text}{end}{rest.split(end)[1]}"


def main() -> None:
    page = PAGE.read_text()
    fresh = replaced(replaced(page, BEGIN, END, drawing()), BEGIN_STATES, END_STATES, states())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh)
    elif fresh != page:
        raise SystemExit(f"{PAGE.name}: the drawings are out of date; `make drawing` updates it")


if __name__ == "__main__":
    main()
