from collections.abc import Iterator

import pytest
from shared import prefect_harness


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    with prefect_harness():
        yield
