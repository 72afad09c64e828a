"""A line chart as a PNG, drawn with numpy alone, so that no plotting library is needed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 900, 600
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 30, 60
SCALE = 3
"""Pixels per dot of a letter."""

COLOURS = [(31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189), (255, 127, 14)]
GREY, BLACK = (210, 210, 210), (0, 0, 0)

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.%/-:, "
_ROWS = (
    "757 26227 71747 71717 55711 74717 74757 71111 75757 75717 75755 65656 74447 65556 74647 74644 "
    "74557 55755 72227 11157 55655 44447 57755 65555 75557 75744 75563 75765 74717 72222 55557 "
    "55552 55775 55255 55222 71247 00002 51245 11244 00700 02020 00024 00000"
).replace("757 ", "75557 ", 1)
_GLYPHS = dict(zip(_LETTERS, _ROWS.split(), strict=True))

Canvas = npt.NDArray[np.uint8]


def write_chart(
    path: Path,
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Draw lines of points in percent, 0 to 110 on both axes."""
    canvas: Canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    for percent in range(0, 111, 10):
        x, y = _place(percent, percent)
        canvas[TOP : HEIGHT - BOTTOM, x] = GREY
        canvas[y, LEFT : WIDTH - RIGHT] = GREY
        _write(canvas, x - 10, HEIGHT - BOTTOM + 8, str(percent), BLACK)
        _write(canvas, LEFT - 44, y - 7, str(percent), BLACK)
    _write(canvas, LEFT, 8, f"{title}: {axes[1]}", BLACK)
    _write(canvas, LEFT, HEIGHT - 24, axes[0], BLACK)
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        _write(canvas, LEFT + 330, HEIGHT - BOTTOM - 26 * (len(lines) - number), name, colour)
        places = [_place(*point) for point in points]
        for start, end in pairwise(places):
            _draw(canvas, start, end, colour)
        for x, y in places:
            canvas[y - 4 : y + 5, x - 4 : x + 5] = colour
    path.write_bytes(_png(canvas))


def _place(x: float, y: float) -> tuple[int, int]:
    wide, high = WIDTH - LEFT - RIGHT - 1, HEIGHT - TOP - BOTTOM - 1
    return LEFT + round(x / 110 * wide), HEIGHT - BOTTOM - 1 - round(y / 110 * high)


def _draw(
    canvas: Canvas, start: tuple[int, int], end: tuple[int, int], colour: tuple[int, int, int]
) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1) + 1
    xs = np.linspace(start[0], end[0], steps).round().astype(int)
    ys = np.linspace(start[1], end[1], steps).round().astype(int)
    for shift in (0, 1):
        canvas[ys + shift, xs] = colour


def _write(canvas: Canvas, x: int, y: int, text: str, colour: tuple[int, int, int]) -> None:
    for letter in text.upper():
        for row, dots in enumerate(_GLYPHS[letter]):
            for column in range(3):
                if int(dots) >> (2 - column) & 1:
                    top, left = y + row * SCALE, x + column * SCALE
                    canvas[top : top + SCALE, left : left + SCALE] = colour
        x += 4 * SCALE


def _png(canvas: Canvas) -> bytes:
    rows = b"".join(b"\x00" + row.tobytes() for row in canvas)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
