"""What `broken_promises.py` breaks is still there, and so are the tests that see it; that they do see it is shown by running it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.settings import CHECKOUT

spec = importlib.util.spec_from_file_location("broken_promises", Path(__file__).with_name("broken_promises.py"))
assert spec and spec.loader
broken_promises = importlib.util.module_from_spec(spec)
sys.modules["broken_promises"] = broken_promises
spec.loader.exec_module(broken_promises)


@pytest.mark.parametrize("breakage", broken_promises.BREAKAGES, ids=lambda breakage: breakage.what)
def test_what_is_broken_by_hand_is_there_and_the_test_that_sees_it(breakage: Any) -> None:
    assert (CHECKOUT / breakage.path).read_text().count(breakage.old) == 1
    file, _, name = breakage.test.partition("::")
    test = name.partition("[")[0]
    assert f"def {test}(" in (CHECKOUT / file).read_text() if test else (CHECKOUT / file).exists()
