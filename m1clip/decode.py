"""Bytes of an untrusted image file to an RGB image, or one sentence on why not. No torch."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock

import simplejpeg
from PIL import Image, UnidentifiedImageError

from m1clip.images import to_rgb

MAX_PIXELS = 200_000_000  # above is a decompression bomb; the largest cameras and panoramas stay below
MAX_BYTES = 256_000_000
MIN_SIZE = 8
MAX_SCANS = 50  # of a progressive JPEG, each of which takes as long as a whole image; encoders write about ten
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
# No formats that run programs or fetch other files, such as EPS. Many phones write MPO as .jpg.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF", "JPEG2000", "ICO", "TGA")
# What Pillow's decoders raise on malformed bytes.
DECODE_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(AssertionError, RuntimeError, struct.error, zlib.error, Image.DecompressionBombError),
)
IMAGE_SUFFIX = re.compile(r"\.(jpe?g|jpe|jfif|png|webp|gif|bmp|tiff?|avif|heic|heif|jp2|ppm|pgm)$", re.I)
RAW_SUFFIX = re.compile(
    r"\.(3fr|arw|cr2|cr3|crw|dng|erf|iiq|kdc|mef|mos|mrw|nef|nrw|orf|pef|raf|rw2|rwl|sr2|srf|srw|x3f)$", re.I
)
HUGE = 10_000_000  # pixels: from here on pixels are averaged before anything else, and are not exactly open_clip's
REDUCIBLE = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")
ORIENTATION = 0x0112
TRANSPOSES = {  # by the EXIF orientation; 1 is upright
    **{2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM},
    **{5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE},
    8: Image.Transpose.ROTATE_90,
}
RAW_TRANSPOSES = {3: Image.Transpose.ROTATE_180, 5: Image.Transpose.ROTATE_90, 6: Image.Transpose.ROTATE_270}
HEIC_BRANDS = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypheim", b"ftypheis", b"ftyphevc")
PILLOW_LOCK = Lock()


class BadImage(ValueError):  # noqa: N818 - the image is wrong, not the program
    """`kind` is what bad rows are counted by, the message is a sentence."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Pillow without warnings and without its pixel limit: ours has a message.

    Both are global, so one thread at a time changes them, and the program that uses us finds them as they were.
    """
    with PILLOW_LOCK, warnings.catch_warnings(action="ignore"):
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Format, size and mode; the pixels are not decoded yet."""
    if not data:
        raise BadImage("empty file", "the file is empty")
    if data[4:12] in HEIC_BRANDS and not supports_heic():
        raise BadImage("HEIC", "HEIC images need pip install 'm1clip[heic]'")
    try:
        with quiet_pillow():
            image = Image.open(io.BytesIO(data), formats=supported_formats())
    except UnidentifiedImageError:
        raise BadImage("unreadable", f"not an image of a known format (starts with {data[:8]!r})") from None
    except DECODE_ERRORS as error:
        raise _bad_image("the header is broken", error) from None
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage("refused", f"{width:,} × {height:,} pixels are refused as a decompression bomb")
    if min(width, height) < MIN_SIZE:
        raise BadImage("tiny", f"{width} × {height} pixels; {MIN_SIZE} × {MIN_SIZE} is the minimum")
    if image.info.get("progressive") and count_scans(data) > MAX_SCANS:
        raise BadImage("refused", f"a JPEG of more than {MAX_SCANS} scans would take very long to decode")
    return image


def count_scans(data: bytes) -> int:
    """Scans of a JPEG, at most one more than are accepted."""
    scans, position = 0, 2
    while scans <= MAX_SCANS and (marker := MARKER.search(data, position)):
        kind, position = data[marker.end() - 1], marker.end()
        if kind == 0xD9:  # the end of the image; videos may follow
            break
        scans += kind == 0xDA
        position += max(2, int.from_bytes(data[position : position + 2])) if kind not in (0x01, 0xD8) else 0
    return scans


def decode(data: bytes, min_size: int = 0, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Upright RGB image. A large JPEG is decoded at a smaller scale, a huge image is reduced, not below `min_size`."""
    header = read_header(data, max_pixels)
    is_plain_jpeg = header.format in ("JPEG", "MPO") and header.mode in ("RGB", "L")
    try:
        # At 7/8 of its size a JPEG is not decoded faster, and its pixels would differ from those of other libraries.
        scaled_size = min_size if min(header.size) >= 2 * min_size else 0
        image = _decode_jpeg(data, scaled_size) if is_plain_jpeg else None
        with quiet_pillow():
            if image is None:
                header.load()
            # Not read earlier: load() already applies the orientation of some formats.
            transpose = TRANSPOSES.get(header.getexif().get(ORIENTATION, 1))
            image = image or to_rgb(_reduce(header, min_size))
            image = image if transpose is None else image.transpose(transpose)
            image.info = {}  # or the orientation would be applied twice
            return image
    except BadImage:
        raise
    except MemoryError:
        raise BadImage("refused", "decoding it needs more memory than is available") from None
    except DECODE_ERRORS as error:
        raise _bad_image("cannot be decoded", error) from None


def _reduce(image: Image.Image, min_size: int) -> Image.Image:
    """Average whole pixels before transparency is removed: of 100 megapixels that takes 4 s and three copies."""
    factor = min(image.size) // min_size if min_size else 1
    if factor < 2 or image.width * image.height < HUGE or image.mode not in REDUCIBLE:
        return image
    if image.mode in ("P", "1") or "transparency" in image.info:  # a palette or a transparent color has no average
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image.reduce(factor)


def _bad_image(reason: str, error: Exception) -> BadImage:
    return BadImage("truncated" if "truncated" in str(error).lower() else "unreadable", f"{reason} ({error})")


def _decode_jpeg(data: bytes, min_size: int) -> Image.Image | None:
    """With libjpeg-turbo, which reports damage that Pillow hides; None if only Pillow can decode it."""
    try:
        return Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", min_height=min_size, min_width=min_size))
    except ValueError as error:
        if str(error).startswith("Premature end"):
            raise BadImage("truncated", "the file ends before the image does") from None
        if str(error).startswith("Corrupt JPEG data"):
            detail = str(error).partition(": ")[2]
            raise BadImage("damaged", f"the JPEG data is corrupt ({detail})") from None
        return None


def decode_raw(data: bytes, min_size: int = 0) -> Image.Image:
    """The preview that a camera stores in a RAW file, upright."""
    try:
        import rawpy
    except ImportError:
        raise BadImage("RAW", "RAW images need pip install 'm1clip[raw]'") from None
    try:
        with rawpy.imread(io.BytesIO(data)) as raw:
            preview, transpose = raw.extract_thumb(), RAW_TRANSPOSES.get(raw.sizes.flip)
    except (rawpy.LibRawError, *DECODE_ERRORS) as error:
        raise _bad_image("the RAW file has no preview that can be read", error) from None
    if isinstance(preview.data, bytes):  # a JPEG
        image = decode(preview.data, min_size)
        if ORIENTATION in read_header(preview.data).getexif():  # decode has turned it
            return image
    else:
        image = Image.fromarray(preview.data).convert("RGB")
    return image if transpose is None else image.transpose(transpose)


@lru_cache
def supports_raw() -> bool:
    return find_spec("rawpy") is not None


@lru_cache
def supports_heic() -> bool:
    """Whether pillow-heif is installed; if so, it is registered with Pillow."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


@lru_cache
def supported_formats() -> tuple[str, ...]:
    Image.init()
    supports_heic()
    return tuple(name for name in FORMATS if name in Image.OPEN)
