"""Text that becomes captions: the encoding of a file, HTML, words of folder and file names. No torch."""

import codecs
import re
import unicodedata
from typing import BinaryIO
from urllib.parse import unquote

from m1clip.format import unescape_html

# Tags with attributes only if these have a value: `a <b and c> d` is no HTML.
_ATTRIBUTES = r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'<>]+))*\s*/?>"""
_INLINE = "a|abbr|b|big|cite|code|del|em|font|i|ins|mark|q|s|small|span|strike|strong|sub|sup|tt|u"
_BLOCK = "article|blockquote|body|br|center|dd|div|dl|dt|figcaption|figure|h[1-6]|head|header|hr|html|iframe|img|li"
_BLOCK += "|ol|p|pre|section|table|tbody|td|tfoot|th|thead|title|tr|ul|wbr"
INLINE_TAG, BLOCK_TAG = (re.compile(rf"</?(?:{names}){_ATTRIBUTES}", re.I) for names in (_INLINE, _BLOCK))
# A comment ends at the next one that begins, or many unclosed ones would take quadratic time.
NO_TEXT = re.compile(rf"<!--(?:(?!<!--).)*?-->|<(script|style){_ATTRIBUTES}(?:(?!<\1).)*?</\1\s*>", re.I | re.S)
ENTITY = re.compile(r"&(#\d+|#x[\da-f]+|[a-z]+\d*);", re.I)

# IMG_1234, DSC00012, PXL_20210704_101112, screenshots: names that a camera, a phone or a program gave.
CAMERA_NAME = re.compile(
    r"_?[A-Z]{1,5}[-_ ]?\d{3,}|(?i:img|image|dsc[nf]?|photo|pic|frame|scan|file)[-_ ]?\d+"
    r"|(?i:screen[-_ ]?shot|whatsapp[-_ ]image|photo[-_ ]on|fb_img|signal|received)[-_ ].*\d.*"
)
UUID = re.compile(r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}", re.I)
HASH = re.compile(r"(?=.*\d)[\da-f]{8,}|(?=.{7})[a-z]*(\d+[a-z]+){2,}\d*", re.I)
NO_WORD = re.compile(r"\d+(px)?|\d{2,}x\d{2,}|copy|edited|scaled|thumb(nail)?|coco|(train|val|test)\d+", re.I)
GENERIC = {"image", "img", "photo", "picture", "pic", "file", "frame", "scan", "download", "screenshot", "untitled"}
# Names of albums and of folders in general, and names that are labels only among other labels.
ALBUM = re.compile(
    r"((new|my|saved|shared|all|recent) )?(albums?|folders?|collections?|pictures|photos|images)|untitled.*"
    r"|screen ?shots?|dcim|\d{3} ?[a-z]{4,5}|camera (roll|uploads?)|favou?rites|recents?|recently .*|(down|up)loads?"
    r"|(im|ex)ports?|takeout|icloud.*|whatsapp.*|instagram|snapchat|selfies|bursts?|trash|backups?|te?mp|thumbnails?"
    r"|.*\(\d+\)|(class|label|category|cluster|group|batch|part|set|folder|album|day|dir|shard)[ -]?\d+",
    re.I,
)
VAGUE = re.compile(
    r"misc|unsorted|others?|originals?|edited|inputs?|outputs?|results?|samples?|.*\b(19|20)\d\d\b.*", re.I
)


# Five bytes are undefined in cp1252.
codecs.register_error("latin-1", lambda error: (error.object[error.start : error.end].decode("latin-1"), error.end))  # type: ignore[attr-defined]


MAX_INSPECTED_BYTES = 64_000_000  # of a text file whose encoding is detected


def detect_encoding(file: BinaryIO) -> tuple[str, str, str]:
    """Encoding and `errors` for reading a text file, and an excerpt that is not UTF-8 if that decided it.

    A file is cp1252 if most lines beyond ASCII are not UTF-8; otherwise these lines are broken lines of a UTF-8 file.
    So are lines with the byte FF: ÿ hardly occurs in text, but often in damaged files.
    """
    head = file.read(4096)
    file.seek(0)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16", "replace", ""
    for encoding, high_bytes in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if 2 * high_bytes.count(0) > len(high_bytes):
            return encoding, "replace", ""
    valid, invalid, first = 0, 0, b""
    while file.tell() < MAX_INSPECTED_BYTES and (line := file.readline(MAX_INSPECTED_BYTES)):
        if not line.isascii() and b"\xff" not in line:
            try:
                line.decode()
                valid += 1
            except UnicodeDecodeError:
                invalid += 1
                first = first or line
    file.seek(0)
    if invalid > valid:
        examples = re.findall(r".{0,30}[^\0-\x7f].{0,30}", first.decode("cp1252", "latin-1"))
        return "cp1252", "latin-1", examples[0].strip()
    return "utf-8-sig", "surrogateescape", ""


def remove_html(text: str) -> str:
    """The text without HTML tags and entities; `a < b`, `<3` and `<|endoftext|>` stay."""
    if "<" not in text and not ENTITY.search(text):
        return text
    plain = unescape_html(text) if ENTITY.search(text) else text
    plain = INLINE_TAG.sub("", BLOCK_TAG.sub(" ", NO_TEXT.sub(" ", plain)))
    return text if plain == text else " ".join(plain.split())


def is_label(name: str) -> bool:
    """Whether a folder name is made of words and is no usual name of an album."""
    words = label_words(name)
    is_camera_name = CAMERA_NAME.fullmatch(name) or CAMERA_NAME.fullmatch(words)
    return bool(re.search(r"[^\W\d_]{2}", words)) and not ALBUM.fullmatch(words) and not is_camera_name


def is_vague(name: str) -> bool:
    """Whether a folder name is a label only among other labels, such as `other`."""
    return bool(VAGUE.fullmatch(label_words(name)))


def label_caption(label: str, template: str) -> str:
    """golden_retriever → a photo of a golden retriever."""
    name = label_words(label) or label
    if name.lower().startswith(tuple("aeiou")):
        template = re.sub(r"\b(a|A) \{\}", r"\1n {}", template)
    return template.replace("{}", name)


def label_words(label: str) -> str:
    """n02099601-golden_retriever or 042.golden_retriever → golden retriever."""
    return re.sub(r"^(n\d{8}[-_ ]|\d{3}\.)", "", label).replace("_", " ").strip()


def filename_caption(stem: str) -> str:
    """The words of a file name without its suffix; empty if it has none, as IMG_1234, a number or a hash."""
    stem = unicodedata.normalize("NFC", unquote(stem)).strip()
    if CAMERA_NAME.match(stem):
        stem = CAMERA_NAME.sub(" ", stem, count=1)
    tokens = re.split(r"[\s_+.,;~()\[\]{}@-]+", UUID.sub(" ", stem))
    tokens = [token for token in tokens if token and not HASH.fullmatch(token)]
    while tokens and NO_WORD.fullmatch(tokens[-1]):
        tokens.pop()
    while tokens and NO_WORD.fullmatch(tokens[0]):
        tokens.pop(0)
    bare = (re.sub(r"(?<=[^\W\d])(0\d*|\d{3,})$", "", token) for token in tokens)  # dog0001
    words = [word for token in bare for word in re.split(r"(?<=[^\W\d_A-Z])(?=[A-Z])", token)]
    has_word = any(re.search(r"[a-z]{2}|[^\W\d_a-z]", word, re.I) for word in words)
    return " ".join(words) if has_word and not {word.lower() for word in words} <= GENERIC else ""
