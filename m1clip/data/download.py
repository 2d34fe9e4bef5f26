"""Images from URLs in tables, if --allow urls permits it. No torch."""

import http.client
import os
import time
import urllib.error
import urllib.request as http_request
from hashlib import sha256
from pathlib import Path

from m1clip.data.decode import MAX_BYTES, BadImage
from m1clip.files import cache_folder

TIMEOUT_S = 20
ATTEMPTS = 2
# Not the default handlers, which also open file: and ftp: URLs, even after a redirect.
HANDLERS = (
    *(http_request.ProxyHandler, http_request.HTTPHandler, http_request.HTTPSHandler),
    *(http_request.HTTPRedirectHandler, http_request.HTTPErrorProcessor),
    http_request.HTTPDefaultErrorHandler,
)


def download(url: str) -> Path:
    """The file of a URL, downloaded once and kept in the cache."""
    path = cache_folder() / "downloads" / sha256(url.encode()).hexdigest()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(_fetch(url))
        os.replace(partial, path)
    return path


def _fetch(url: str) -> bytes:
    opener = http_request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            request = http_request.Request(url, headers={"User-Agent": "m1clip"})
            with opener.open(request, timeout=TIMEOUT_S) as response:
                return _read_body(response)
        except urllib.error.HTTPError as error:
            raise BadImage("missing file", f"{url[:80]} answers {error.code} {error.reason}") from None
        except BadImage:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = " ".join(str(error).split())
    raise BadImage("missing file", f"{url[:80]} cannot be downloaded ({reason})")


def _read_body(response: http.client.HTTPResponse) -> bytes:
    """The whole body, limited in size and time."""
    data, deadline = b"", time.monotonic() + 3 * TIMEOUT_S
    while part := response.read(1 << 16):
        data += part
        if len(data) > MAX_BYTES:
            raise BadImage("refused", f"the response is larger than {MAX_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took longer than {3 * TIMEOUT_S} s")
    expected = response.headers.get("Content-Length", "")
    if expected.isdecimal() and len(data) < int(expected):
        raise OSError(f"received {len(data):,} of {expected} bytes")
    return data
