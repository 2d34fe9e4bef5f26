"""Bytes of an image, from anywhere, to an image; or one sentence on why not. Trusts nothing. No torch."""

import io
import struct
import warnings
import zlib
from functools import lru_cache

import simplejpeg
from PIL import Image, UnidentifiedImageError

from m1clip.images import rgb

MOST_PIXELS = 200_000_000
"""Larger is taken for a decompression bomb; the largest cameras and panoramas stay below."""
MOST_BYTES = 256_000_000
SMALLEST = 8
"""Pixels: a shorter side shows nothing."""
# No formats that run programs or fetch other files (EPS, for one); MPO is what many phones write as .jpg.
FORMATS = (
    "JPEG",
    "MPO",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "AVIF",
    "HEIF",
    "JPEG2000",
    "ICO",
    "TGA",
)
# What Pillow's readers raise on bytes that lie.
BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HEIC = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypheim", b"ftypheis", b"ftyphevc")


class BadImage(ValueError):  # noqa: N818 - it is the image that is wrong
    """`kind` is a word or two to count by, the message a sentence."""

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # it travels between processes
        return BadImage, (self.kind, str(self))


def header(data: bytes) -> Image.Image:
    """The image, its pixels not yet decoded: format, size and mode are known."""
    if not data:
        raise BadImage("empty file", "the file is empty")
    if data[4:12] in HEIC and not heic():
        raise BadImage("HEIC", "HEIC images need pip install 'm1clip[heic]'")
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit, below, with a sentence of its own
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=known())
    except UnidentifiedImageError:
        raise BadImage("unreadable", f"not an image of a known kind (it begins with {data[:8]!r})") from None
    except BROKEN as error:
        raise _bad("the header is broken", error) from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise BadImage("refused", f"{width:,} × {height:,} pixels are refused as a decompression bomb")
    if min(width, height) < SMALLEST:
        raise BadImage("tiny", f"{width} × {height} pixels show nothing")
    return image


def decode(data: bytes, least: int = 0) -> Image.Image:
    """The image, upright and in RGB. A large JPEG comes smaller, if neither side falls below `least`."""
    image = header(data)
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    try:
        with warnings.catch_warnings(action="ignore"):
            whole = _jpeg(data, least) if plain else None
            if whole is None:
                image.load()
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))  # not before: loading turns some kinds
            whole = whole or rgb(image)
            whole = whole if turn is None else whole.transpose(turn)
            whole.info = {}  # so that nobody turns it again
            return whole
    except BadImage:
        raise
    except MemoryError:
        raise BadImage("refused", "decoding it needs more memory than there is") from None
    except BROKEN as error:
        raise _bad("cannot be decoded", error) from None


def _bad(what: str, error: Exception) -> BadImage:
    return BadImage("truncated" if "truncated" in str(error).lower() else "unreadable", f"{what} ({error})")


def _jpeg(data: bytes, least: int) -> Image.Image | None:
    """By libjpeg-turbo itself, which tells of damage that Pillow passes over; None if only Pillow can."""
    try:
        return Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", min_height=least, min_width=least))
    except ValueError as error:
        if str(error).startswith("Premature end"):
            raise BadImage("truncated", "the file ends before the image does") from None
        if str(error).startswith("Corrupt JPEG data"):
            detail = str(error).partition(": ")[2]
            raise BadImage("damaged", f"the JPEG data is corrupt ({detail})") from None
        return None


@lru_cache
def heic() -> bool:
    """Whether HEIC can be read: once asked, Pillow can too."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


@lru_cache
def known() -> tuple[str, ...]:
    Image.init()
    heic()
    return tuple(name for name in FORMATS if name in Image.OPEN)
