"""Gap to the reference against training tokens per parameter, over all groups of a report."""
