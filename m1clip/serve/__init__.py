"""m1clip serve: embeddings of an ONNX export over HTTP, in the formats of other servers. Never imports torch."""

from dataclasses import dataclass

ENCODER_BATCH = 32  # items that are encoded at once
MAX_REQUESTS = 1000  # that are answered at once


@dataclass(frozen=True)
class Limits:
    max_batch: int = 2048  # items of one request
    max_queue: int = 4096  # items that wait for an encoder
    max_bytes: int = 32_000_000  # of one request
    max_pixels: int = 50_000_000  # of one image

    @property
    def max_bytes_in_flight(self) -> int:
        """Of all requests together."""
        return max(8 * self.max_bytes, 256_000_000)
