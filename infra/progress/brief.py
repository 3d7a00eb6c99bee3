"""The few log lines that a terminal shows without `-v`: one for a step, for an evaluation, for a program that is started."""

import logging

brief = logging.getLogger(__name__)
