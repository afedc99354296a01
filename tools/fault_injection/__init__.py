"""What clusters do to a run, done to a small one: kills, signals, full disks, damaged files."""
