"""Plan an echo task."""

from bench.contract.echo import Echo
from bench.contract.echo_plan import EchoPlan
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning.commands import fields_of_all
from bench.planning.parallelism import split


def check(config: Config) -> None:
    """Raise ConfigError when nothing would be echoed."""
    echo = _block(config)
    if not echo.words or echo.repeats < 1:
        what = f"{len(echo.words)} words, {echo.repeats} times"
        raise ConfigError(what, where="task.echo", fix="give a word, and repeat it once or more")


def make(config: Config, base: Config | None) -> EchoPlan:
    """Return the plan of a run that echoes."""
    echo = _block(config)
    words = [text for text in echo.words for _ in range(echo.repeats)]
    return EchoPlan(**fields_of_all(config), world=split(config, tp=1, pp=1, cp=1, sp=False), words=words)


def _block(config: Config) -> Echo:
    assert config.task.echo is not None
    return config.task.echo
