"""Images from the net, for tables that name addresses, and only where --allow urls asks for it."""

import http.client
import os
import time
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path

from m1clip.data.decode import MOST_BYTES, BadImage
from m1clip.files import cache_folder

WAIT_S = 20
TRIES = 2


def fetched(address: str) -> Path:
    """The file of an address, fetched once and kept; only http and https, also where it is sent on."""
    path = cache_folder() / "fetched" / sha256(address.encode()).hexdigest()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_bytes(_get(address))
    os.replace(aside, path)
    return path


def _get(address: str) -> bytes:
    opener = urllib.request.OpenerDirector()  # not the default one, which also opens files and ftp
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    for left in reversed(range(TRIES)):
        try:
            request = urllib.request.Request(address, headers={"User-Agent": "m1clip"})
            with opener.open(request, timeout=WAIT_S) as answer:
                return _whole(answer)
        except urllib.error.HTTPError as error:
            raise BadImage("missing file", f"{address[:80]} answers {error.code} {error.reason}") from None
        except BadImage:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not left:
                what = " ".join(str(error).split())
                raise BadImage("missing file", f"{address[:80]} cannot be fetched ({what})") from None
    raise AssertionError("the last try returns or raises")


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """All that was promised, in bounded time and size."""
    data, end = b"", time.monotonic() + 3 * WAIT_S
    while part := answer.read(1 << 16):
        data += part
        if len(data) > MOST_BYTES:
            raise BadImage("refused", f"the answer is larger than {MOST_BYTES:,} bytes")
        if time.monotonic() > end:
            raise TimeoutError(f"it took longer than {3 * WAIT_S} s")
    promised = answer.headers.get("Content-Length")
    if promised and promised.isdecimal() and len(data) < int(promised):
        raise OSError(f"{len(data):,} of {promised} bytes came")
    return data
