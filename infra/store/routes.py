"""Routes of a sample of a mixture of experts: the experts to which its engine sent each token, in each layer.

A .npy array [tokens - 1, layers, experts of a token], uint8 for up to 256 experts, int16 for more. Row t is that of token t of prompt and
output. The last token was never read by the engine, so it has no row.
"""

import io
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[Any]  # uint8 or int16


class RouteShape(NamedTuple):
    """What decides the form of routes, by the model."""

    num_layers: int
    per_token: int
    """Experts that a token is sent to."""
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint8 if self.num_experts <= 256 else np.int16


def serialized(routes: Routes) -> bytes:
    """Equal routes give equal bytes."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(routes), allow_pickle=False)
    return stream.getvalue()


def parsed(data: bytes) -> Routes:
    """Raises ValueError if the bytes are no .npy array."""
    routes: Routes = np.load(io.BytesIO(data), allow_pickle=False)
    return routes
