"""Many images on one, each above its caption."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from m1clip.data.decode import BadImage
from m1clip.data.pairs import PairDataset

SIDE, GAP, LINE = 224, 14, 17
BLANK = (235, 235, 238)
Shot = tuple[Image.Image, str]


def shown(pairs: PairDataset, number: int) -> list[Shot]:
    """Images from all over the set, those that can be shown; the first ones where it is drawn or small."""
    if len(pairs) > 4 * number and hasattr(pairs, "read"):
        rows = np.linspace(0, len(pairs) - 1, number).astype(int).tolist()
    else:
        rows = list(range(min(number, len(pairs))))
    return [shot(pairs, row) for row in rows]


def shot(pairs: PairDataset, row: int, note: str = "") -> Shot:
    try:
        return pairs.image(row, SIDE), note + pairs.captions(row)[0]
    except BadImage as error:
        return Image.new("RGB", (SIDE, SIDE), BLANK), f"{pairs.row(row)}: {error}"


def contact_sheet(shots: Sequence[Shot], columns: int) -> Image.Image:
    font = ImageFont.load_default(13)
    texts = [textwrap.wrap(caption, 34)[:4] for _, caption in shots]
    lines = max(len(text) for text in texts)
    width, height = SIDE + GAP, SIDE + LINE * lines + 2 * GAP
    columns = min(columns, len(shots))
    rows = -(-len(shots) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, ((image, _), text) in enumerate(zip(shots, texts, strict=True)):
        x, y = GAP + i % columns * width, GAP + i // columns * height
        whole = ImageOps.pad(image.convert("RGB"), (SIDE, SIDE), color=BLANK)
        sheet.paste(whole, (x, y))
        pen.multiline_text((x, y + SIDE + 5), "\n".join(text), fill=(50, 50, 60), font=font, spacing=3)
    return sheet
