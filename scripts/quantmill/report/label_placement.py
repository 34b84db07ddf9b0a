"""Positions of the labels of a picture's points: close by, over nothing else if there is room, with a line to the
point if they are further away."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
CHARACTER, LINE = 6.5, 13  # pixels of a text in 12 px; a wide font has wide characters
DISTANCES = (8, 18, 30, 44, 60, 80)
DIRECTIONS = [math.tau * i / 16 for i in range(16)]  # the first is to the right
NEAR = DISTANCES[0]  # needs no line
ROUNDS = 4  # in which each label may move away from the others


@dataclass(frozen=True)
class LabelPosition:
    """Position of a label: the text's anchor, its end (Vega's `align`), and the end of the line to its point."""

    x: float
    y: float
    align: str
    line: Point | None

    def box(self, text: str) -> Box:
        """Return the box that the text covers."""
        width = CHARACTER * len(text)
        left = self.x - width * {"left": 0, "center": 0.5, "right": 1}[self.align]
        return left, self.y - LINE / 2, left + width, self.y + LINE / 2


def candidates(point: Point, text: str) -> list[tuple[float, LabelPosition]]:
    """Return positions of a label, the closest first, each with its distance."""
    found: list[tuple[float, LabelPosition]] = []
    for distance in DISTANCES:
        for direction in DIRECTIONS:
            across, down = math.cos(direction), math.sin(direction)
            far = max(abs(across), abs(down))
            sideways = round(across / far, 6)  # 1: the box begins right of the point, 0: it is centred over it
            width = CHARACTER * len(text)
            align = "center" if abs(sideways) < 1 else "left" if sideways > 0 else "right"
            x = point[0] + across * distance + (0 if align != "center" else sideways * width / 2)
            y = point[1] + down * distance + down / far * LINE / 2
            left, top, right, bottom = LabelPosition(x, y, align, None).box(text)
            end = (min(max(point[0], left), right), min(max(point[1], top), bottom))
            found.append((distance, LabelPosition(x, y, align, end if distance > NEAR else None)))
    return found


def covered(point: Point, text: str, place: LabelPosition) -> list[Box]:
    """Return what a label and its line cover, the line as a few small boxes."""
    boxes = [place.box(text)]
    if place.line:
        for share in (0.3, 0.5, 0.7, 0.9):
            x, y = (one + share * (other - one) for one, other in zip(point, place.line, strict=True))
            boxes.append((x - 2, y - 2, x + 2, y + 2))
    return boxes


def hidden(boxes: Sequence[Box], others: Sequence[Box]) -> float:
    """Return how badly boxes cover others: the area, plus a constant for each pair."""
    one, other = np.array(boxes).reshape(-1, 1, 4), np.array(others).reshape(1, -1, 4)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    area = np.prod(np.clip(sides, 0, None), axis=-1)
    return float(area.sum() + 20 * np.count_nonzero(area))


def places(points: Sequence[Point], texts: Sequence[str], obstacles: Sequence[Box], size: Point) -> list[LabelPosition]:
    """Return a position for the label of each point, within a picture of width and height `size`."""
    outside = [(-9e3, -9e3, 9e3, 0), (-9e3, size[1], 9e3, 9e3), (-9e3, -9e3, 0, 9e3), (size[0], -9e3, 9e3, 9e3)]
    options = [
        [(distance, place, covered(point, text, place)) for distance, place in candidates(point, text)]
        for point, text in zip(points, texts, strict=True)
    ]
    chosen = [each[0] for each in options]
    placed: set[int] = set()
    for i in [*range(len(points))] * ROUNDS:
        taken = [box for j in placed - {i} for box in chosen[j][2]]
        fixed = [*obstacles, *outside, *taken]
        chosen[i] = min(options[i], key=lambda each: each[0] + hidden(each[2], fixed))
        placed.add(i)
    return [place for _, place, _ in chosen]
