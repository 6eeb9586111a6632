"""Everything that MLPerf's rules say."""
