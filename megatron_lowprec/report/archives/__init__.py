"""Sources of runs: folders and archives; writing archives that show nothing of the machine."""
