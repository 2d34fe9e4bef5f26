"""Downloads from the Hugging Face hub: without a network, one sentence at once instead of minutes of retries."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT_TIMEOUT_S = 3.0


@contextmanager
def downloading(context: str) -> Iterator[None]:
    """Without a network only the hub's cache is used; any failure becomes a FileNotFoundError of one sentence."""
    from huggingface_hub import constants

    is_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = is_offline or not is_reachable()
    try:
        yield
    except Exception as error:  # through several libraries
        if isinstance(error, ValueError) and not isinstance(error, OSError):  # not about the download
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1].strip() if is_reachable() else "there is no network, and it is not in the hub's cache"
        raise FileNotFoundError(f"{context} cannot be downloaded: {reason}") from None
    finally:
        constants.HF_HUB_OFFLINE = is_offline


def is_reachable() -> bool:
    from huggingface_hub import constants

    if getproxies().keys() & {"http", "https", "all"}:  # a proxy may reach what we cannot
        return True
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
