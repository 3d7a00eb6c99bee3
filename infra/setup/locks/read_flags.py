"""Print an engine's command-line options as JSON, {option: its destination}: made once for each version in the locks, kept in flags/.

    .venv-sglang/bin/python infra/setup/locks/read_flags.py sglang > infra/setup/locks/flags/sglang-VERSION.json     from SGLang's own parser
    python3 infra/setup/locks/read_flags.py vllm FOLDER > infra/setup/locks/flags/vllm-VERSION.json    from the sources in an unpacked wheel

vLLM's package cannot be imported on a machine without CUDA, so its sources are read: every add_argument with constant names, and the fields
of the classes from which the other options of its server are made.
"""

import argparse
import ast
import importlib.util
import json
import sys
from pathlib import Path

VLLM_SOURCES = ("vllm/engine/arg_utils.py", "vllm/entrypoints/openai/cli_args.py")
VLLM_CLASSES = ("BaseFrontendArgs", "FrontendArgs")


def of_sglang() -> dict[str, str]:
    if importlib.util.find_spec("triton") is None:  # a machine without CUDA: as sglang_server.py does
        spec = importlib.util.spec_from_file_location("sglang_cpu", Path(__file__).parents[2] / "engines/launchers/sglang_cpu.py")
        assert spec and spec.loader
        sys.modules["sglang_cpu"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option: str(action.dest) for action in parser._actions for option in action.option_strings}


def of_vllm(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in VLLM_SOURCES:
        for node in ast.walk(ast.parse((folder / source).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                names = [text for text in texts if text.startswith("-")]
                dest = next((name for name in names if name.startswith("--")), "").lstrip("-").replace("-", "_")
                found |= dict.fromkeys(names, dest)
            elif isinstance(node, ast.ClassDef) and node.name in VLLM_CLASSES:
                fields = [
                    each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
                found |= {f"--{field.replace('_', '-')}": field for field in fields}
    return found


if __name__ == "__main__":
    options = of_sglang() if sys.argv[1] == "sglang" else of_vllm(Path(sys.argv[2]))
    json.dump(options, sys.stdout, indent=0, sort_keys=True)
    print()
