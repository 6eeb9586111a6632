"""Where things lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "mlperf_logs"
"""Published logs; tests that read them are skipped where they are not."""
