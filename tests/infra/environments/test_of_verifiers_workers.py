"""What workers of tasksets import of ours is there in verifiers' environment too: it needs no package that only Ratchet's own has."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions

from infra.settings import CHECKOUT

PROGRAMS = CHECKOUT / "infra/environments/verifiers_tasks"
PROGRAM = """import importlib, sys
missing = set(sys.argv[1].split(","))

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_workers_of_tasksets_import_nothing_that_verifiers_environment_lacks() -> None:
    lock = (CHECKOUT / "infra/setup/locks/verifiers.txt").read_text().splitlines()
    there = {normal(line.partition("==")[0].strip()) for line in lock if "==" in line} | {"ratchet"}
    missing = [module for module, found in packages_distributions().items() if not {normal(name) for name in found} & there]
    assert "orjson" in missing and "prefect" in missing and "numpy" not in missing
    theirs = {
        found
        for file in PROGRAMS.glob("*.py")
        for found in re.findall(r"^from (infra[\w.]+) import", file.read_text(), re.MULTILINE)
    }
    imported = ["infra.rewards.worker", *sorted(name for name in theirs if "verifiers_tasks" not in name)]
    assert "infra.environments.tools" in imported
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(missing), *imported], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
