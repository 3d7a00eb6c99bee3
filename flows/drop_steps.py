"""Drop a run's steps from one on, so that they are made again: `python -m flows.drop_steps RUN STEP`."""

import argparse
import logging
import sys

from infra.processes.gpu_lock import sole_use
from infra.runs import lineage
from infra.settings import settings
from infra.store.files import open_workspace
from infra.store.layout import run_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.drop_steps",
        description="Remove the steps of a run from STEP on, with the adapters that they made and their evaluations. "
        "The run then goes on from there. Rows that MLflow has of these steps stay until the steps are made again.",
    )
    parser.add_argument("run", help="name of the run")
    parser.add_argument("step", type=int, help="number of the first step to drop")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    try:
        open_workspace()
        if not run_folder(options.run).is_dir():
            raise ValueError(f"workspace {settings().workspace} has no run {options.run!r}")
        with sole_use(f"drop_steps of run {options.run}"):
            removed = lineage.drop(options.run, options.step)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for folder in removed:
        print(f"removed {folder}")
    print(f"run {options.run} goes on with step {options.step}")


if __name__ == "__main__":
    main()
