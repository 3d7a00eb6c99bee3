"""End the servers, the engine, the trainer and the upload that this workspace has started, and nothing else.

A run that is at work in this workspace fails when its engine goes: `ratchet stop RUN` ends it first.

ratchet down
ratchet stop mine && ratchet down
RATCHET_WORKSPACE=/data/other ratchet down                       those of another workspace
"""


def down() -> None:
    from flows.cli.services import servers
    from flows.cli.terminal import log_to_terminal

    log_to_terminal()
    servers.stop()
