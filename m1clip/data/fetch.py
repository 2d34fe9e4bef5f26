"""Pictures from the net, for tables that name addresses, and only where --allow urls asks for it."""

import http.client
import os
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path

from m1clip.data.decode import MOST_BYTES, BadPicture
from m1clip.data.disk import cache_folder

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
                data: bytes = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise BadPicture("missing file", f"{address[:80]} answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not left:
                raise BadPicture("missing file", f"{address[:80]} cannot be fetched ({error})") from None
            continue
        if len(data) > MOST_BYTES:
            raise BadPicture("refused", f"{address[:80]} is larger than {MOST_BYTES:,} bytes")
        return data
    raise AssertionError("the last try returns or raises")
