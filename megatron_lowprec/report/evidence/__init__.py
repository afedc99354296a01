"""What a report rests on, and what it lacks: sources of runs, archives of them, runs that would decide a claim."""
