"""pretrain_gpt.py for tests of sweeps: no training, the same files.

modes.json beside this script says by recipe what happens: ``fail`` at iteration 2, ``fail_once``, ``short`` (exit code
0 at iteration 2), ``slow`` (iterations of 50 ms until the end or SIGTERM, after which it saves), ``requeue`` (asks for
it at iteration 2 and exits with code 1, as torchrun would), ``deaf`` (``slow``, and SIGTERM is ignored at first, as
while a run is being imported).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

args = sys.argv[1:]
value = {args[i]: args[i + 1] for i in range(len(args) - 1) if args[i].startswith("--")}
save, recipe, iters = Path(value["--save"]), value["--recipe"], int(value["--train-iters"])
modes = Path(__file__).with_name("modes.json")
mode = json.loads(modes.read_text()).get(recipe) if modes.exists() else None
tracker = save / "latest_checkpointed_iteration.txt"
stop = False


def on_signal(number, frame):
    global stop
    stop = True


signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else on_signal)
begun = int(tracker.read_text()) if "--load" in value else 0
rank = int(os.environ.get("RANK", "0"))
if rank == 0:
    with (save / "calls.jsonl").open("a") as file:
        kept = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE")}
        call = {"argv": args, "begun": begun, "pid": os.getpid(), "time": time.time(), **kept}
        file.write(json.dumps(call) + "\n")
print(f"{recipe} from {begun}", flush=True)


def leave(iteration, code, saved=True):
    if rank == 0 and saved:
        tracker.write_text(str(iteration))
    sys.exit(code)


for iteration in range(begun + 1, iters + 1):
    if mode in ("slow", "deaf"):
        time.sleep(0.05)
    if iteration == 20:
        signal.signal(signal.SIGTERM, on_signal)
    if rank == 0:
        with (save / "metrics.jsonl").open("a") as file:
            row = {"iteration": iteration, "lm loss": 5.0, "iteration-time": 0.05, "batch-size": 4}
            file.write(json.dumps(row) + "\n")
    if stop:
        time.sleep(0.2)  # saving takes a while
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
leave(iters, 0)
