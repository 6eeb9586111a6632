"""Studies: a named set of runs, what of it runs next, and the tables that its logs prove."""

from bench.studies.folder import STUDY
from bench.studies.library import titles
from bench.studies.reading import read
from bench.studies.session import Session, begin, folder_of

__all__ = ["STUDY", "Session", "begin", "folder_of", "read", "titles"]
