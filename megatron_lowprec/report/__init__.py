"""From the folders of runs to evidence: curves, differences with their uncertainty, and papers' claims judged."""
