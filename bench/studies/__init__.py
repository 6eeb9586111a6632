"""Studies: run a named set of runs, and turn their logs into tables."""

from bench.studies import platforms
from bench.studies.folder import STUDY, name_of
from bench.studies.library import titles
from bench.studies.reading import read
from bench.studies.session import Session, begin, folder_of

__all__ = ["STUDY", "Session", "begin", "folder_of", "name_of", "platforms", "read", "titles"]
