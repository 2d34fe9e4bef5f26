"""A scene's words to an image. All chance comes from the generator it is given."""

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw

from m1clip.data.synthetic.drawings import (
    COLORS,
    FIXED,
    GROUPS,
    PAINTS,
    PLACES,
    POSITIONS,
    RGB,
    SIZES,
    SKIES,
    SUBJECTS,
    TIMES,
    TRIMS,
    Look,
    Tones,
)
from m1clip.data.synthetic.polygons import Sketch

Box = tuple[float, float, float, float]  # middle and foot, width (negative: mirrored) and height


def mix(a: RGB, b: RGB, share: float) -> RGB:
    """Color a with a share of b."""
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


@lru_cache
def colored(color: str) -> Tones:
    """The tones of a subject."""
    main = COLORS[color]
    shades = {"main": main, "dark": mix(main, (90, 16, 36), 0.25), "light": mix(main, (255, 255, 255), 0.3)}
    return {**FIXED, **shades, "ink": mix(main, (24, 12, 32), 0.66)}


@lru_cache
def lit(time: str) -> Tones:
    """The tones of everything else."""
    hour = TIMES[time]
    red, green, blue = hour.tint
    tinted = {tone: (int(r * red), int(g * green), int(b * blue)) for tone, (r, g, b) in PAINTS.items()}
    return {**FIXED, **tinted, "cloud": hour.cloud, "bird": hour.bird, "glass": hour.glass}


@lru_cache(maxsize=8)
def empty_sky(time: str, side: int) -> Image.Image:
    zenith, horizon = TIMES[time].zenith, TIMES[time].horizon
    column = Image.new("RGB", (1, side))
    column.putdata([mix(zenith, horizon, min(1.0, y / (0.42 * side))) for y in range(side)])
    return column.resize((side, side))


def stamp(pen: ImageDraw.ImageDraw, parts: Sketch, tones: Tones, box: Box, ink: RGB | None = None) -> None:
    """Draw a sketch, with a line around the whole of it if there is ink."""
    middle, foot, width, height = box
    x, y = middle - width / 2, foot - height
    if ink:
        for part in parts:
            if part.tone not in ("white", "black"):  # steam, eyes and wheels need none
                pen.polygon([(x + width * u, y + height * v) for u, v in part.around], fill=ink)
    for part in parts:
        pen.polygon([(x + width * u, y + height * v) for u, v in part.inside], fill=tones[part.tone])


def paint_orb(image: Image.Image, look: Look, x: float, rng: Random) -> None:
    """The sun with its halo, or a crescent moon among stars."""
    side, hour, pen = image.width, TIMES[look.time], ImageDraw.Draw(image, "RGBA")
    y = hour.orb_y + rng.uniform(-0.02, 0.02)

    def disc(x: float, y: float, radius: float, fill: tuple[int, ...]) -> None:
        pen.ellipse([side * edge for edge in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    if look.time != "night":
        disc(x, y, 0.09, (*hour.orb, 70))
        return disc(x, y, 0.06, hour.orb)
    for _ in range(16):
        disc(rng.random(), rng.uniform(0, 0.36), rng.uniform(0.002, 0.004), (255, 250, 220, 150))
    disc(x, y, 0.06, hour.orb)
    disc(x + 0.03, y - 0.012, 0.051, mix(hour.zenith, hour.horizon, y / 0.42))


def paint_place(image: Image.Image, look: Look, rng: Random) -> None:
    side, place, tones, pen = image.width, PLACES[look.place], lit(look.time), ImageDraw.Draw(image)
    horizon = rng.uniform(0.38, 0.43) * side
    for i in range(place.count):
        x = (i + 0.5 + rng.uniform(-0.2, 0.2)) / place.count * side
        width = rng.uniform(1.0, 1.3) / place.count * side
        height = rng.uniform(0.85, 1.15) * place.height * side
        stamp(pen, place.motif, tones, (x, horizon + 1, width * rng.choice((-1, 1)), height))
    pen.rectangle((0, horizon, side, side), fill=tones[place.ground])
    middle = rng.uniform(0.45, 0.55) * side
    stamp(pen, place.floor, tones, (middle, side, side * rng.choice((-1, 1)), side - horizon))


def paint_flyers(image: Image.Image, look: Look, columns: Sequence[float], rng: Random) -> None:
    side, pen = image.width, ImageDraw.Draw(image)
    ink = None if look.sky in ("clouds", "birds") else FIXED["slate"]
    for column, trim in zip(columns, rng.sample(TRIMS, len(columns)), strict=True):
        tones = {**lit(look.time), "trim": trim, "pale": mix(trim, (255, 255, 255), 0.6)}
        scale = rng.uniform(0.88, 1.1) * (0.2 if look.sky in ("clouds", "planes") else 0.16) * side
        x = min(max(column * side, scale / 2), side - scale / 2)
        foot = rng.uniform(0.01, 0.15) * side + scale
        stamp(pen, SKIES[look.sky], tones, (x, foot, scale * rng.choice((-1, 1)), scale), ink)


def paint_subjects(image: Image.Image, look: Look, rng: Random) -> None:
    side, box, tones = image.width, SIZES[look.size], colored(look.color)
    pen, shadow = ImageDraw.Draw(image), ImageDraw.Draw(image, "RGBA")
    step = 0.97 * box + 0.015
    reach = (box + step * (look.count > 1)) / 2
    centre = min(max(POSITIONS[look.position], reach), 1 - reach)
    front = rng.uniform(0.92, 0.95) if look.count > 2 else rng.uniform(0.8, 0.92)
    wobble = 0.02 if look.size == "small" else 0.01  # large ones would hide each other
    mirror = rng.choice((-1, 1))  # all or none: a pair face to face reads as one thing
    for across, back in GROUPS[look.count]:
        scale = rng.uniform(0.92, 1.08) * box
        x = centre + across * step + rng.uniform(-wobble, wobble)
        x = min(max(x, scale / 2), 1 - scale / 2) * side
        foot = min(front + back * (step + 0.015) + rng.uniform(-wobble, wobble), 0.97) * side
        scale *= side
        edges = (x - 0.46 * scale, foot - 0.06 * scale, x + 0.46 * scale, foot + 0.06 * scale)
        shadow.ellipse(edges, fill=(20, 20, 50, 60))
        stamp(pen, SUBJECTS[look.subject], tones, (x, foot, scale * mirror, scale), tones["ink"])


def paint(look: Look, rng: Random, size: int = 224) -> Image.Image:
    """The image, size by size; an equal look and an rng in an equal state give equal bytes."""
    image = empty_sky(look.time, 2 * size).copy()  # drawn twice as large and halved: smooth edges
    flyers = rng.randint(2, 3)
    # One column of the sky more than there are flyers, so that the sun or moon has its own.
    columns = [(i + 0.5 + rng.uniform(-0.15, 0.15)) / (flyers + 1) for i in range(flyers + 1)]
    rng.shuffle(columns)
    paint_orb(image, look, columns.pop(), rng)
    paint_place(image, look, rng)
    paint_flyers(image, look, columns, rng)
    paint_subjects(image, look, rng)
    return image.reduce(2)
