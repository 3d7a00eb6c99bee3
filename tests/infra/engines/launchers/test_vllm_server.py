"""vLLM's launcher, over a package that stands in for vLLM: it has what the launcher uses, and says what it was given."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[4] / "infra/engines/launchers/vllm_server.py"
FILES = {
    "vllm/entrypoints/cli/serve.py": "def validate_parsed_serve_args(args):\n    args.checked = True\n",
    "vllm/entrypoints/serve/utils/server_utils.py": "GUARDED_PREFIX = ('/v1', '/v2', '/inference')\n",
    "vllm/entrypoints/cli/main.py": """
import argparse, pickle, sys
def main():
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.serve.utils import server_utils
    args = argparse.Namespace(api_key=None, argv=sys.argv[1:])
    serve.validate_parsed_serve_args(args)
    print("non-default args:", vars(args))
    print("guards", server_utils.GUARDED_PREFIX, "knows", args.api_key == ["the-secret"])
    print("elsewhere", pickle.loads(pickle.dumps(args.api_key)))
    print("finds ours", any(p.rstrip("/").endswith("/infra") for p in sys.path))
""",
}


def test_the_key_reaches_vllm_and_neither_its_log_nor_its_other_processes(tmp_path: Path) -> None:
    for name, content in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        for folder in [path.parent, *path.parent.parents]:
            if folder.is_relative_to(tmp_path / "site" / "vllm"):
                (folder / "__init__.py").touch()
    (tmp_path / "key").write_text("the-secret\n")
    env = os.environ | {"RATCHET_API_KEY_FILE": str(tmp_path / "key"), "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, str(PROGRAM), "serve", "model", "--port", "1"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "the-secret" not in said
    assert "'checked': True" in said and "'argv': ['serve', 'model', '--port', '1']" in said
    assert "guards ('/',) knows True" in said
    assert "elsewhere [None]" in said
    assert "finds ours False" in said
