"""The rules of MLPerf Training: logs, results, compliance, scores, forecasts and submission packages."""
