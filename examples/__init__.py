"""Whole stories with real models. Run them from the repository: python -m examples.olmoe.train --help."""
