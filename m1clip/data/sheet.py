"""Many pictures on one, each above its caption."""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SIDE, GAP, LINE = 224, 14, 17


def contact_sheet(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    font = ImageFont.load_default(13)
    texts = [textwrap.wrap(caption, 34)[:4] for caption in captions]
    lines = max(len(text) for text in texts)
    width, height = SIDE + GAP, SIDE + LINE * lines + 2 * GAP
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        x, y = GAP + i % columns * width, GAP + i // columns * height
        sheet.paste(picture.convert("RGB").resize((SIDE, SIDE)), (x, y))
        pen.multiline_text((x, y + SIDE + 5), "\n".join(text), fill=(50, 50, 60), font=font, spacing=3)
    return sheet
