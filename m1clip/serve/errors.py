"""What is wrong with a request."""

import math

from starlette.exceptions import HTTPException


class RequestError(HTTPException):
    """One sentence; `param` is the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_s: float | None = None):
        super().__init__(status, message, None if retry_s is None else {"Retry-After": str(math.ceil(retry_s))})
        self.param = param


def busy(reason: str, wait_s: float = 1.0) -> RequestError:
    return RequestError(429, f"the server is busy: {reason}; try again later", retry_s=max(1.0, wait_s))
