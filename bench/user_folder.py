"""The folder of the user's own configs and tables."""

import os
from pathlib import Path


def user_folder() -> Path:
    """Return the folder of the user's own configs and tables, which need not exist: ~/.config/runstop."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "runstop"
