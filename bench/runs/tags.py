"""Tags and a note of a run, which its user writes: tags.json in the run folder.

The file is no part of the result: the manifest does not list it, so a tagged run can still be verified, and a signature
stays valid.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import masked_json, masking
from bench.contract import atomic_files
from bench.contract.run_files import TAGS
from bench.errors import ConfigError, written
from bench.runs import names
from bench.runs.folder import require_ours
from bench.texts import control_character, quoted

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,39}")
MAX_TAGS, MAX_NOTE = 20, 500
"""How many tags a run may have, and how many characters a note may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What a user has written about a run."""

    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The tags and the note as rows of a table; empty without both."""
        return [row for row in (("tags", ", ".join(self.tags)), ("note", self.note)) if row[1]]

    @property
    def text(self) -> str:
        """The tags and the note on one line; empty without both."""
        return "; ".join(filter(None, (", ".join(self.tags), self.note)))


def read(folder: Path) -> Tags:
    """Return the tags and the note of a run; what `write` would refuse is left out."""
    raw = atomic_files.read_object(folder / TAGS)
    tags, note = raw.get("tags"), raw.get("note")
    kept = [tag for tag in tags if isinstance(tag, str) and _TAG.fullmatch(tag)] if isinstance(tags, list) else []
    is_note = isinstance(note, str) and len(note) <= MAX_NOTE and not control_character(note)
    return Tags(tags=tuple(dict.fromkeys(kept))[:MAX_TAGS], note=str(note) if is_note else "")


def change(folder: Path, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> Tags:
    """Add and remove tags of a run, and replace its note if one is given; an empty note removes it.

    Raises:
        ConfigError: this is not a run folder of this user, or a tag or the note is not allowed.
        BenchError: the file cannot be written.
    """
    if not names.is_run(folder):
        raise names.not_a_run(folder)
    require_ours(folder.resolve())
    before, add, remove = read(folder), tuple(add), set(remove)
    for tag in add:
        if not _TAG.fullmatch(tag):
            fix = "use at most 40 letters, digits and . _ : + - in a tag; for a sentence use --note"
            raise ConfigError(f"{quoted(tag)} is not allowed as a tag", where="runstop tag", fix=fix)
    if note is not None and (len(note) > MAX_NOTE or control_character(note)):
        fix = f"write one line of at most {MAX_NOTE} characters"
        what = f"the note is longer than {MAX_NOTE} characters, or contains a control character"
        raise ConfigError(what, where="--note", fix=fix)
    if unknown := sorted(remove - {*before.tags}):
        known = ", ".join(before.tags) or "none"
        raise ConfigError(
            f"the run has no tag {unknown[0]}", where=str(folder), fix=f"remove only tags that the run has: {known}"
        )
    masking.refuse([note or ""], where=TAGS)
    tags = tuple(tag for tag in dict.fromkeys((*before.tags, *add)) if tag not in remove)
    if tags[MAX_TAGS:]:
        raise ConfigError(f"a run can have at most {MAX_TAGS} tags", where=str(folder), fix="remove tags with --remove")
    after = Tags(tags=tags, note=before.note if note is None else note.strip())
    with written(folder):
        if after == Tags():
            (folder / TAGS).unlink(missing_ok=True)
        elif after != before:
            masked_json.write(folder / TAGS, asdict(after))
    return after
