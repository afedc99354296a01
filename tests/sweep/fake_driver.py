"""pretrain_gpt.py for tests of sweeps: no training, the same files.

modes.json beside this script says by recipe what happens:

``fail``, ``fail_once``: exit code 1 at iteration 2.
``short``: exit code 0 at iteration 2.
``requeue``: asks for it at iteration 2 and exits with code 1, as torchrun would.
``hold``: after iteration 2 writes ``holding.RANK`` and waits for SIGTERM, after which it saves iteration 3, or for the
    file ``release`` beside this script.
``full``: ``hold``, and the save fails.
``deaf``: ``hold``, and a first SIGTERM is lost, as while a run is being imported.
``meet``: two jobs at a time wait for each other.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE = 1800.0  # seconds; ends a hang

args = sys.argv[1:]
value = {args[i]: args[i + 1] for i in range(len(args) - 1) if args[i].startswith("--")}
save, recipe, iters = Path(value["--save"]), value["--recipe"], int(value["--train-iters"])
modes = Path(__file__).with_name("modes.json")
mode = json.loads(modes.read_text()).get(recipe) if modes.exists() else None
tracker = save / "latest_checkpointed_iteration.txt"
signals = 0


def on_signal(number, frame):
    global signals
    signals += 1


def told():
    return signals > (mode == "deaf")


def wait(until):
    end = time.monotonic() + PATIENCE
    while not until():
        if time.monotonic() > end:
            sys.exit(3)
        time.sleep(0.02)


signal.signal(signal.SIGTERM, on_signal)
begun = int(tracker.read_text()) if tracker.exists() else 0
rank = int(os.environ.get("RANK", "0"))
running = save / "running"
if rank == 0:
    running.touch()
    with (save / "calls.jsonl").open("a") as file:
        kept = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE")}
        at_once = len(list(save.parent.glob("*/running")))
        file.write(json.dumps({"argv": args, "begun": begun, "pid": os.getpid(), "at_once": at_once, **kept}) + "\n")
print(f"{recipe} from {begun}", flush=True)
if mode == "meet":
    for other in save.parent.glob("*/running"):
        if other != running and not other.with_name("met").exists():
            for job in (save, other.parent):
                (job / "met").touch()
    wait((save / "met").exists)


def leave(iteration, code, saved=True):
    if rank == 0 and saved:
        tracker.write_text(str(iteration))
    if rank == 0:
        running.unlink()
    sys.exit(code)


for iteration in range(begun + 1, iters + 1):
    if rank == 0:
        with (save / "metrics.jsonl").open("a") as file:
            row = {"iteration": iteration, "lm loss": 5.0, "iteration-time": 0.05, "batch-size": 4}
            file.write(json.dumps(row) + "\n")
    if told():
        time.sleep(0.2)  # saving takes a while
        if mode == "full":
            print("No space left on device", file=sys.stderr, flush=True)
            leave(iteration, 2, saved=False)
        print("saved", flush=True)
        leave(iteration, 0)
    if iteration == 2:
        if mode == "fail" or (mode == "fail_once" and not begun):
            print("something is wrong", file=sys.stderr, flush=True)
            leave(iteration, 1)
        if mode == "short":
            leave(iteration, 0)
        if mode == "requeue" and not begun:
            (save / "requeue").write_text("SIGUSR1 at iteration 2\n")
            leave(iteration, 1)
        if mode in ("hold", "full", "deaf"):
            (save / f"partial.{rank}").write_text(str(os.getpid()))
            (save / f"partial.{rank}").rename(save / f"holding.{rank}")
            wait(lambda: told() or Path(__file__).with_name("release").exists())
leave(iters, 0)
