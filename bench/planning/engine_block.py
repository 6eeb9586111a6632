"""Each engine with settings has a block of this name in the config; only the block of the chosen engine is set."""

from bench.contract.schema import Config, EngineName
from bench.errors import ConfigError


def check(config: Config, name: EngineName) -> None:
    """Refuse a block of this engine that is set for another engine, or missing.

    Raises:
        ConfigError: engine.name was changed alone.
    """
    chosen, block = config.engine.name, getattr(config.engine, name.value)
    if (chosen is name) != (block is not None):
        raise ConfigError(
            f"engine.name is {chosen.name}, but the block engine.{name.value} is "
            f"{'missing' if block is None else 'set'}",
            where=f"engine.name, engine.{name.value}",
            fix=f"replace engine.name={chosen.name} by engine={chosen.name}, which also sets the block of the engine",
        )
