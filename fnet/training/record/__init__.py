"""What a run leaves: logs, media, plots, predictions and metrics."""
