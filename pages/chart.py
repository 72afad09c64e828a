"""SVG charts of the measurements in bench/results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pages.measured import report, results

WIDTH: Final = 720
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c")
_PASSES: Final = {
    "cold": "cold engine",
    "engine restarted": "engine restarted",
    "tierd restarted": "engine and tierd restarted",
}


def restart_chart() -> str:
    """Time to first token of a prompt of about 2,150 tokens: computed, and loaded from tierd."""
    found = [(label, results("demo")[name]) for name, label in _PASSES.items()]
    longest = max(entry["first_turn_ttft_s"] for _, entry in found)
    parts = [_text(20, 28, "Time to first token, 2,150-token prompts, vLLM on two CPU cores", 16)]
    for row, (label, entry) in enumerate(found):
        y, seconds = 50 + 40 * row, entry["first_turn_ttft_s"]
        width = 380 * seconds / longest
        colour = _COLOURS[0] if row else "#888888"
        parts.append(_text(20, y + 19, label))
        parts.append(
            f'<rect x="220" y="{y}" width="{width:.1f}" height="28" fill="{colour}"/>',
        )
        parts.append(_text(228 + width, y + 19, f"{seconds:.2f} s"))
    end = 50 + 40 * len(found)
    load = report("demo")["load_average_1m"]
    parts.append(_text(20, end + 14, f"Medians of three prompts; load average {load:.1f}", 12))
    return _picture(end + 30, parts)


def hits_chart() -> str:
    """Hits in host memory by its size, on a public trace of conversations."""
    policies = results("policies")["mooncake_conversation_trace"]
    sizes = [int(size) for size in policies["hazard"] if size.isdigit()]
    lines = [("tierd (hazard)", "hazard"), ("LRU", "lru"), ("LFU", "lfu")]
    left, top, wide, high = 60, 50, 600, 260
    parts = [_text(20, 28, "Block hits in %, Mooncake conversation trace, by host memory size", 16)]
    for hits in range(0, 41, 10):
        y = top + high - high * hits / 40
        parts.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="#ddd"/>')
        parts.append(_text(left - 30, y + 5, str(hits)))
    for size in sizes:
        parts.append(_text(left + wide * size / 50_000 - 12, top + high + 20, f"{size // 1000}k"))
    for number, (label, name) in enumerate(lines):
        points = [
            (left + wide * size / 50_000, top + high - high * policies[name][str(size)] / 40)
            for size in sizes
        ]
        colour = _COLOURS[number]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts.append(_text(left + 440, top + high - 80 + 22 * number, label, fill=colour))
    return _picture(top + high + 40, parts)


def _text(x: float, y: float, text: str, size: int = 14, fill: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}">{text}</text>'


def _picture(height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])
