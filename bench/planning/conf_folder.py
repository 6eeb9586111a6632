"""The folder of the shipped configs: inside the package when installed, next to it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
CONF = next(d for d in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if d.is_dir())
