"""Outlines of the shapes and smooth masks of them; knows nothing of colours or tasks."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

# Masks are drawn this much larger and averaged down, for smooth edges.
OVERSAMPLING = 3


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corner points within the unit circle, y downwards."""
    match shape:
        case "circle" | "ring":
            angles = [2 * math.pi * step / 48 for step in range(48)]
            return tuple((math.cos(angle), math.sin(angle)) for angle in angles)
        case "square":
            return ((-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78))
        case "diamond":
            return ((0, -1), (0.66, 0), (0, 1), (-0.66, 0))
        case "triangle":
            return tuple((math.sin(angle), -math.cos(angle)) for angle in (0, 2 * math.pi / 3, 4 * math.pi / 3))
        case "star":
            points = []
            for step in range(10):
                radius = 1.0 if step % 2 == 0 else 0.42
                points.append((radius * math.sin(math.pi * step / 5), -radius * math.cos(math.pi * step / 5)))
            return tuple(points)
        case "cross":
            a, b = 0.32, 0.95
            upper = ((-b, -a), (-a, -a), (-a, -b), (a, -b), (a, -a), (b, -a))
            return (*upper, *((-x, -y) for x, y in upper))
        case "heart":
            # The common parametric heart, 16 sin^3 t against 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled.
            points = []
            for step in range(48):
                t = 2 * math.pi * step / 48
                y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
                points.append((16 * math.sin(t) ** 3 / 17.5, -(y + 2.5) / 17.5))
            return tuple(points)
    raise ValueError(f"no outline for {shape}")


def shape_mask(shape: str, radius: float, degrees: float, stretch: float) -> np.ndarray:
    """Coverage float32 [side, side] in [0, 1] of a shape turned by `degrees`, wider by `stretch` and higher by 1/it."""
    side = 2 * math.ceil(radius * max(stretch, 1 / stretch)) + 3
    image = Image.new("L", (side * OVERSAMPLING, side * OVERSAMPLING))
    draw = ImageDraw.Draw(image)
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    middle = side * OVERSAMPLING / 2

    def placed(scale: float) -> list[tuple[float, float]]:
        size = radius * OVERSAMPLING * scale
        return [
            (middle + size * stretch * (x * cosine - y * sine), middle + size / stretch * (x * sine + y * cosine))
            for x, y in outline(shape)
        ]

    draw.polygon(placed(1.0), fill=255)
    if shape == "ring":
        draw.polygon(placed(0.55), fill=0)
    return np.asarray(image.reduce(OVERSAMPLING), dtype=np.float32) / 255
