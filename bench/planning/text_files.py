"""Small text files that a setting names: refuse those that are unreadable, too large, or not UTF-8 or JSON lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """What a file may be, and how messages name it."""

    name: str
    """Such as `file of prompts`."""
    setting: str
    max_bytes: int
    shorten: str
    """The fix if the file is too large."""
    fix: str
    """The fix for other content: what to write."""

    def read(self, path: Path) -> tuple[str, bytes]:
        """Return the text of a file, without a byte order mark, and its bytes.

        Raises:
            ConfigError: it cannot be read, is too large, or is not UTF-8.
        """
        try:
            if (size := path.stat().st_size) > self.max_bytes:
                raise ConfigError(
                    f"the {self.name} has {size:,} bytes, but at most {self.max_bytes:,} bytes are allowed",
                    where=str(path),
                    fix=self.shorten,
                )
            content = path.read_bytes()
            return content.decode("utf-8-sig"), content
        except OSError as error:
            raise ConfigError(
                f"the {self.name} cannot be read: {error.strerror}",
                where=str(path),
                fix=f"set {self.setting} to a readable file",
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"the {self.name} is not UTF-8 text: {error.reason}", where=str(path), fix=self.fix
            ) from error

    def json_lines(self, text: str, path: Path) -> Iterator[tuple[Any, str]]:
        """Yield the value of each line that is not blank, and the place of the line for messages.

        Raises:
            ConfigError: a line is not JSON.
        """
        for number, line in enumerate(text.split("\n"), start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the line is not JSON: {error}", where=where, fix=self.fix) from error
            yield value, where
