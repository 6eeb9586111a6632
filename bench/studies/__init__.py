"""Studies: run a named set of runs, and turn their logs into tables."""

from bench.studies.folder import STUDY
from bench.studies.library import titles
from bench.studies.reading import read
from bench.studies.session import Session, begin, folder_of

__all__ = ["STUDY", "Session", "begin", "folder_of", "read", "titles"]
