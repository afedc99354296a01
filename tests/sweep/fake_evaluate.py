"""tools/evaluate.py for tests of sweeps: notes its arguments; fails at --recipe fail, waits for a signal at hold."""

import json
import os
import signal
import sys
from pathlib import Path

args = sys.argv[1:]
if "fail" in args:
    print("no such recipe", file=sys.stderr, flush=True)
    sys.exit(2)
run = Path(args[args.index("--load") + 1])
if "hold" in args:
    rank = os.environ.get("RANK", "0")
    (run / f"partial.{rank}").write_text(str(os.getpid()))
    (run / f"partial.{rank}").rename(run / f"holding.{rank}")
    signal.alarm(1800)  # ends a hang
    signal.pause()
assert (run / "latest_checkpointed_iteration.txt").exists()
Path(args[args.index("--out") + 1]).write_text(json.dumps({"argv": args}))
