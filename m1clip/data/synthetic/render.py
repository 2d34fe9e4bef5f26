"""Draws a scene. All randomness comes from the generator that is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw

from m1clip.data.synthetic import drawings
from m1clip.data.synthetic.drawings import COLORS, FIXED, PLACES, RGB, SIZES, SKIES, SUBJECTS, TIMES, Sketch, Tones

Draw = ImageDraw.ImageDraw
Box = tuple[float, float, float, float]  # center x, bottom y, width (negative: mirrored) and height


@dataclass(frozen=True)
class Scene:
    """What an image shows: one field for each word of its caption."""

    subject: str
    color: str
    count: int  # 1 to 4
    size: str  # small, large
    position: str  # left, middle, right
    place: str
    time: str
    sky: str


def mix(a: RGB, b: RGB, weight: float) -> RGB:
    """Color a, blended with b."""
    red, green, blue = (round(x + (y - x) * weight) for x, y in zip(a, b, strict=True))
    return red, green, blue


@lru_cache
def subject_tones(color: str) -> Tones:
    main = COLORS[color]
    shades = {"main": main, "dark": mix(main, (90, 16, 36), 0.25), "light": mix(main, (255, 255, 255), 0.3)}
    return {**FIXED, **shades, "ink": mix(main, (24, 12, 32), 0.66)}


@lru_cache
def background_tones(time: str) -> Tones:
    light = TIMES[time]
    red, green, blue = light.tint
    paints = drawings.PAINTS.items()
    tinted = {tone: (int(r * red), int(g * green), int(b * blue)) for tone, (r, g, b) in paints}
    return {**FIXED, **tinted, "cloud": light.cloud, "bird": light.bird, "glass": light.glass}


@lru_cache(maxsize=8)
def sky_gradient(time: str, size: int) -> Image.Image:
    zenith, horizon = TIMES[time].zenith, TIMES[time].horizon
    column = Image.new("RGB", (1, size))
    column.putdata([mix(zenith, horizon, min(1.0, y / (0.42 * size))) for y in range(size)])
    return column.resize((size, size))


def draw_sketch(draw: Draw, sketch: Sketch, tones: Tones, box: Box, ink: RGB | None = None) -> None:
    """Fill the polygons of a sketch, on an outline around all of them if there is ink."""
    center, bottom, width, height = box
    x, y = center - width / 2, bottom - height
    if ink:
        for polygon in sketch:
            if polygon.tone not in ("white", "black"):  # steam, eyes and wheels need none
                draw.polygon([(x + width * u, y + height * v) for u, v in polygon.outline], fill=ink)
    for polygon in sketch:
        draw.polygon([(x + width * u, y + height * v) for u, v in polygon.inside], fill=tones[polygon.tone])


def draw_orb(image: Image.Image, scene: Scene, x: float, rng: Random) -> None:
    """The sun with its halo, or a crescent moon among stars."""
    size, light, draw = image.width, TIMES[scene.time], ImageDraw.Draw(image, "RGBA")
    y = light.orb_y + rng.uniform(-0.02, 0.02)

    def disc(x: float, y: float, radius: float, fill: tuple[int, ...]) -> None:
        draw.ellipse([size * edge for edge in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    if scene.time != "night":
        disc(x, y, 0.09, (*light.orb, 70))
        return disc(x, y, 0.06, light.orb)
    for _ in range(16):
        disc(rng.random(), rng.uniform(0, 0.36), rng.uniform(0.002, 0.004), (255, 250, 220, 150))
    disc(x, y, 0.06, light.orb)
    disc(x + 0.03, y - 0.012, 0.051, mix(light.zenith, light.horizon, y / 0.42))


def draw_place(image: Image.Image, scene: Scene, rng: Random) -> None:
    size, place, tones = image.width, PLACES[scene.place], background_tones(scene.time)
    draw, horizon = ImageDraw.Draw(image), rng.uniform(0.38, 0.43) * size
    for i in range(place.count):
        x = (i + 0.5 + rng.uniform(-0.2, 0.2)) / place.count * size
        width = rng.uniform(1.0, 1.3) / place.count * size
        height = rng.uniform(0.85, 1.15) * place.height * size
        draw_sketch(draw, place.motif, tones, (x, horizon + 1, width * rng.choice((-1, 1)), height))
    draw.rectangle((0, horizon, size, size), fill=tones[place.ground])
    center = rng.uniform(0.45, 0.55) * size
    draw_sketch(draw, place.floor, tones, (center, size, size * rng.choice((-1, 1)), size - horizon))


def draw_sky(image: Image.Image, scene: Scene, columns: Sequence[float], rng: Random) -> None:
    """Clouds, birds, kites, planes or balloons."""
    size, draw = image.width, ImageDraw.Draw(image)
    ink = None if scene.sky in ("clouds", "birds") else FIXED["slate"]
    for column, trim in zip(columns, rng.sample(list(drawings.TRIMS.values()), len(columns)), strict=True):
        tones = {**background_tones(scene.time), "trim": trim, "pale": mix(trim, (255, 255, 255), 0.6)}
        scale = rng.uniform(0.88, 1.1) * (0.2 if scene.sky in ("clouds", "planes") else 0.16) * size
        x = min(max(column * size, scale / 2), size - scale / 2)
        bottom = rng.uniform(0.01, 0.15) * size + scale
        draw_sketch(draw, SKIES[scene.sky], tones, (x, bottom, scale * rng.choice((-1, 1)), scale), ink)


def draw_subjects(image: Image.Image, scene: Scene, rng: Random) -> None:
    size, box, tones = image.width, SIZES[scene.size], subject_tones(scene.color)
    draw, shadow = ImageDraw.Draw(image), ImageDraw.Draw(image, "RGBA")
    step = 0.97 * box + 0.015
    reach = (box + step * (scene.count > 1)) / 2
    center = min(max(drawings.POSITIONS[scene.position], reach), 1 - reach)
    front = rng.uniform(0.92, 0.95) if scene.count > 2 else rng.uniform(0.8, 0.92)
    jitter = 0.02 if scene.size == "small" else 0.01  # large ones would hide each other
    mirror = rng.choice((-1, 1))  # all or none: a pair face to face looks like one object
    for across, back in drawings.GROUPS[scene.count]:
        scale = rng.uniform(0.92, 1.08) * box
        x = center + across * step + rng.uniform(-jitter, jitter)
        x = min(max(x, scale / 2), 1 - scale / 2) * size
        bottom = min(front + back * (step + 0.015) + rng.uniform(-jitter, jitter), 0.97) * size
        scale *= size
        edges = (x - 0.46 * scale, bottom - 0.06 * scale, x + 0.46 * scale, bottom + 0.06 * scale)
        shadow.ellipse(edges, fill=(20, 20, 50, 60))
        draw_sketch(draw, SUBJECTS[scene.subject], tones, (x, bottom, scale * mirror, scale), tones["ink"])


def render_scene(scene: Scene, rng: Random, size: int = 224) -> Image.Image:
    """Equal scenes and generators in equal states give equal bytes."""
    image = sky_gradient(scene.time, 2 * size).copy()  # drawn at twice the size and halved: smooth edges
    flying = rng.randint(2, 3)
    # One more column than objects in the sky, for the sun or moon.
    columns = [(i + 0.5 + rng.uniform(-0.15, 0.15)) / (flying + 1) for i in range(flying + 1)]
    rng.shuffle(columns)
    draw_orb(image, scene, columns.pop(), rng)
    draw_place(image, scene, rng)
    draw_sky(image, scene, columns, rng)
    draw_subjects(image, scene, rng)
    return image.reduce(2)
