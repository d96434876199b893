"""Runs the snippets of docs/experiments.md, and draws the pictures there from what they print and record.

python -m tests.draw_experiments    # takes two minutes
"""

import io
import math
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.control.test_run_trace import read_page

DOCS = Path(__file__).parent.parent / "docs"
COLORS = ("#3f7fb8", "#b9642f", "#4c874c")
STATES = {"waiting": "#a9afb8", "prefill": "#3f7fb8", "decode": "#4c874c", "preempted": "#cc4b37", "paused": "#c99a1b"}
STYLE = """<style>
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #7d7d7d; }
  .axis { stroke: #888; fill: none; } .line { fill: none; stroke-width: 2; }
</style>"""
WIDTH, HEIGHT, LEFT, TOP = 420, 200, 52, 26  # of one chart, and the place of its axes

Lines = dict[str, Sequence[tuple[float, float]]]


def run_snippets(text: str, folder: Path) -> tuple[dict[str, Any], list[list[list[str]]]]:
    """Run the Python of a page in one namespace, in this folder; return that, and the words that each part printed."""
    namespace: dict[str, Any] = {}
    printed = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for snippet in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            out = io.StringIO()
            with redirect_stdout(out):
                exec(snippet, namespace)
            printed.append([line.split() for line in out.getvalue().splitlines()])
    finally:
        os.chdir(before)
    return namespace, printed


def chart(place: int, title: str, below: str, lines: Lines, marks: Sequence[str] = ()) -> str:
    """Draw lines over common axes that begin at 0; marks: names of the x values 0, 1, 2, where these are no numbers."""
    left, bottom, right = place * WIDTH + LEFT, HEIGHT - 36, (place + 1) * WIDTH - 24
    largest_x = max(x for points in lines.values() for x, _ in points)
    largest_y = max(y for points in lines.values() for _, y in points)

    def at(x: float, y: float) -> str:
        return f"{left + (right - left) * x / largest_x:.1f},{bottom - (bottom - TOP) * y / largest_y:.1f}"

    ticks = [(i, name) for i, name in enumerate(marks)] or [(x, f"{x:g}") for x in nice_steps(largest_x)]
    parts = [f'<path class="axis" d="M{left} {TOP}V{bottom}H{right}"/>', f'<text x="{left}" y="14">{title}</text>']
    parts += [text(at(x, 0), name, dy=16, anchor="middle") for x, name in ticks]
    parts += [text(at(0, y), f"{y:g}", dx=-6, dy=4, anchor="end") for y in nice_steps(largest_y)]
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{below}</text>')
    for points, color in zip(lines.values(), COLORS, strict=False):
        path = "L".join(at(x, y) for x, y in points)
        parts.append(f'<path class="line" stroke="{color}" d="M{path}"/>')
        if len(points) < 12:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in (p.split(",") for p in path.split("L"))
            ]
    names = [f'<tspan fill="{color}">{name}  </tspan>' for name, color in zip(lines, COLORS, strict=False) if name]
    parts.append(f'<text x="{right}" y="14" text-anchor="end" font-weight="600">{"".join(names)}</text>')
    return "\n".join(parts)


def text(place: str, content: str, dx: float = 0, dy: float = 0, anchor: str = "start") -> str:
    x, y = map(float, place.split(","))
    return f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">{content}</text>'


def nice_steps(largest: float) -> list[float]:
    """Return two to five round numbers up to the largest value."""
    step = next(s * 10.0**power for power in range(-4, 7) for s in (1, 2, 5) if largest / (s * 10.0**power) <= 5)
    return [round(step * i, 6) for i in range(1, int(largest / step) + 1)]


def timeline(page: dict[str, Any], title: str, top: int, until: float, names: Sequence[str]) -> str:
    """Draw a line for each request of a recorded run, in the colors of its states; until: seconds."""
    left, right, height = 92, 2 * WIDTH - 24, 16
    parts = [f'<text x="{left}" y="{top - 6}">{title}</text>']
    for row, name in enumerate(names):
        y = top + row * height
        parts.append(text(f"{left - 8},{y + 10}", name, anchor="end"))
        for state, begin, end in stretches(page, row):
            x, width = left + (right - left) * begin / until, (right - left) * (end - begin) / until
            thin = state in ("waiting", "preempted")
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 5 if thin else y + 1}" width="{max(width, 0.8):.1f}" '
                f'height="{3 if thin else 11}" fill="{STATES[state]}"/>'
            )
    return "\n".join(parts)


def stretches(page: dict[str, Any], row: int) -> Iterable[tuple[str, float, float]]:
    """Yield state, begin and end of what a request does, one after another."""
    changes = page["changes"]
    state, since = "waiting", math.inf
    for i in [i for i, its_row in enumerate(changes["row"]) if its_row == row]:
        what, time = page["kinds"][changes["kind"][i]], changes["time"][i]
        if time > since:
            yield state, since, time
        since = time
        if what == "chunk":
            yield "prefill", time, changes["until"][i]
            since = changes["until"][i]
        kept = changes["num_tokens"][i] > 0
        after = {"admitted": "prefill", "chunk": "decode", "preempted": "preempted", "paused": "paused"}
        state = after.get(what, state) if what != "resumed" else "decode" if kept else "preempted"


def save(name: str, title: str, *parts: str, charts: int = 2, height: int = HEIGHT) -> None:
    size = f'viewBox="0 0 {charts * WIDTH} {height}" width="{charts * WIDTH}" height="{height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{title}</title>", STYLE, *parts]
    (DOCS / f"experiment-{name}.svg").write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def main() -> None:
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        namespace, (_, blocks, order, prefix, chunks, pause, *_) = run_snippets(page, Path(scratch))
        runs = [read_page(Path(scratch) / f"pauses-{pauses}.html") for pauses in (False, True)]
    for part in (blocks, order, prefix, chunks, pause):
        print(*(" ".join(words) for words in part), sep="\n")

    sizes = [words[0] for words in blocks]
    save(
        "blocks",
        "Concurrency falls and waste grows with the block size",
        chart(0, "sequences that run at once", "block size", {"": [*enumerate(float(b[1]) for b in blocks)]}, sizes),
        chart(1, "empty share of used blocks", "block size", {"": [*enumerate(float(b[2]) for b in blocks)]}, sizes),
    )
    curves: Lines = {
        name: [(0, 0), *((second, count) for count, second in enumerate(seconds, 1))]
        for name, seconds in namespace["finished"].items()
    }
    save("order", "The shortest first: most requests finish earlier, the last one when it would have anyway",
         chart(0, "requests finished", "seconds", curves), charts=1)  # fmt: skip
    with_and_without: Lines = {
        name: [(float(words[0]), float(words[3])) for words in prefix if words[1] == str(cached)]
        for name, cached in (("with the cache", True), ("without", False))
    }
    save("prefix", "Without the prefix cache, time grows with the common prefix",
         chart(0, "seconds", "tokens that all prompts begin with", with_and_without), charts=1)  # fmt: skip
    by_chunk: Lines = {
        name: [(i, float(words[column])) for i, words in enumerate(chunks)]
        for column, name in enumerate(("first", "mean", "last"), 1)
    }
    save("chunks", "The mean time to the first token is shortest where a step computes about one prompt",
         chart(0, "seconds to the first token", "tokens a step", by_chunk, [words[0] for words in chunks]),
         charts=1)  # fmt: skip
    names = ["long 1", "long 2", "long 3", "long 4", "urgent"]
    until = max(max(run["steps"]["ended"]) for run in runs)
    states = [f'<tspan fill="{color}">{state}   </tspan>' for state, color in STATES.items()]
    save(
        "pause",
        "The urgent request waits for one of four to end; or these are paused, and it runs at once",
        timeline(runs[0], "nothing is paused", 24, until, names),
        timeline(runs[1], "the long ones are paused for the urgent one", 134, until, names),
        f'<text x="92" y="{240}" font-weight="600">{"".join(states)}</text>',
        text(f"{2 * WIDTH - 24},240", f"{until:.1f} seconds", anchor="end"),
        height=250,
    )


if __name__ == "__main__":
    main()
