"""Measures, plots and reports of finished and running experiments."""
