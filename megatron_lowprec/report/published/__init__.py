"""Results published by other projects, as data."""
