"""A user's files with rewards: checked and digested by their sources. Only a worker imports them."""

from infra.config.tools.reward_file import RewardFile, check_file, parsed
from infra.rewards.loading import import_folder, is_in_package, module_name
from infra.store import code_digest


def check(file: RewardFile, what: str = "reward") -> None:
    """Raises ValueError for a path that is not absolute, and for a file that does not exist or is not valid Python.

    what: What the file holds, as the error says it.
    """
    if not file.path.is_absolute():
        raise ValueError(f"{what} {str(file)!r} has a relative path: outside of the command line give it in full, from /")
    check_file(file.path, what)
    parsed(file.path, what)


def source_digest(file: RewardFile) -> str:
    """Digest a file with all modules that it imports from its folder."""
    name = module_name(file.path) if is_in_package(file.path) else "<file>"
    return code_digest.digest_of_foreign(name, file.path, import_folder(file.path))
