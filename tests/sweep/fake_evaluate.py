"""tools/evaluate.py for tests of sweeps: notes its arguments; fails at --recipe fail."""

import json
import sys
from pathlib import Path

args = sys.argv[1:]
if "fail" in args:
    print("no such recipe", file=sys.stderr, flush=True)
    sys.exit(2)
assert (Path(args[args.index("--load") + 1]) / "latest_checkpointed_iteration.txt").exists()
Path(args[args.index("--out") + 1]).write_text(json.dumps({"argv": args}))
