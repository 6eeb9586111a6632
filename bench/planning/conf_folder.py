"""The folder of the shipped configs, inside the package when installed, next to it in a checkout.

Ray unpacks each uploaded folder (`bench.backends.ray.request`) into one of its own and puts these on sys.path.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def first_with_configs(places: Iterable[Path]) -> Path:
    """Return the first folder `conf` with launch.yaml in these places.

    Raises:
        FileNotFoundError: none of them has it; the installation is incomplete.
    """
    for place in places:
        if (place / "conf/launch.yaml").is_file():
            return place / "conf"
    raise FileNotFoundError(
        f"the installation of runstop is incomplete: neither {_PACKAGE} nor {_PACKAGE.parent} has the folder conf"
    )


CONF = first_with_configs((_PACKAGE, _PACKAGE.parent, *map(Path, sys.path)))
