"""Print the script that completes commands and options in a shell.

ratchet completion bash > ~/.local/share/bash-completion/completions/ratchet
ratchet completion zsh > ~/.zfunc/_ratchet                       a folder of fpath
source <(ratchet completion bash)                                in this shell only
"""

from typing import Annotated, Literal

from cyclopts import Parameter

Shell = Annotated[Literal["bash", "zsh"], Parameter(help="Shell to complete in.")]


def completion(shell: Shell, /) -> None:
    from flows.cli.program import program

    print(program().generate_completion(shell=shell))
