"""A whole Slurm on this machine, for tests: munge, slurmctld and a slurmd a node, as root, without systemd or cgroups.

    python -m tests.slurm.loopback COMMAND...      a command that finds this Slurm, and its end

Each node has a host name of its own (a UTS namespace) that leads to loopback (a file mounted over /etc/hosts), so that
batch scripts find node names as on a cluster. Everything lies in one folder. A process beside this one ends all daemons
and jobs, known by SLURM_CONF in their environments, whatever becomes of this one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.environment import ROOT
from tests.waiting import PATIENCE, wait_for

NODES = 8
CPUS = 4
"""Of each node, as Slurm believes; jobs share the real ones."""
_PACKAGES = ("slurm-wlm", "munge")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")

# low, grace: jobs that high preempts. cred_expire makes a requeued job wait 6 seconds and not 120. KillWait and the
# timeouts are for machines that have other things to do. Debian's 22.05 has no pmix, hence MpiDefault=none.
_CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={patience}
MessageTimeout=100
TCPTimeout=60
SlurmdTimeout={patience}
UnkillableStepTimeout={patience}
ReturnToService=2
MinJobAge=3600
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=0
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime={patience}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no Slurm of our own here, in a line; installs it where root and apt-get are there."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    if not _installed():
        if shutil.which("apt-get") is None:
            return f"{' and '.join(_PACKAGES)} are not installed, and there is no apt-get"
        install = ["apt-get", "install", "-y", "--no-install-recommends", *_PACKAGES]
        # the lists of a fresh container are empty
        if not any(_quietly([*update, *install]) for update in ([], ["sh", "-c", 'apt-get update && "$@"', "sh"])):
            return f"apt-get install {' '.join(_PACKAGES)} failed: no network?"
        if not _installed():
            return f"{' and '.join(_PACKAGES)} do not bring {', '.join(_PROGRAMS)}"
    if not _quietly(["unshare", "--uts", "--mount", "true"]):
        return "no namespaces of their own for nodes (unshare --uts --mount)"
    return None


def _installed() -> bool:
    return all(map(shutil.which, _PROGRAMS))


def _quietly(command: Sequence[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment, check=False)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return done.returncode == 0


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: nodes ``n1``, ``n2``, ...; partitions ``low``, ``grace``, ``high``."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes Slurm's commands find it."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**outer, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, cwd: Path | None = None, **more: str) -> str:
        """What a command prints; CalledProcessError or TimeoutExpired where it fails. ``more`` is environment."""
        environment = {**self.environment, **more}
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    def version(self) -> str:
        """``slurm-wlm 22.05.8``."""
        return self.call("sinfo", "--version").strip()

    def job(self, number: str) -> dict[str, str]:
        """scontrol's fields of a job, such as JobState and Restarts; of a task as ``12_3``."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The end of what the daemons wrote, for a failure's message."""
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files)


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Slurm in an empty folder, ready for jobs; nothing of it runs afterwards.

    Raises:
        TimeoutError: a daemon did not come up; their logs are in the message.
    """
    for name in ("munge", "state", "log"):
        (folder / name).mkdir(mode=0o755)  # munged refuses folders that others may write to
    key = folder / "munge" / "key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))
    names = [f"n{number}" for number in range(1, NODES + 1)]
    slurm, ports = Slurm(folder), _free_ports(NODES + 1)
    nodes = [
        f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=1000\n"
        for name, port in zip(names, ports[1:], strict=True)
    ]
    conf = _CONF.format(folder=folder, host=socket.gethostname().split(".")[0], port=ports[0], patience=int(PATIENCE))
    (folder / "slurm.conf").write_text(conf + "".join(nodes))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(names)}\n")
    with _keeper(slurm):
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge/{file}" for option, file in munge.items()]
        _daemon(slurm, "munged", "--foreground", "--force", *options)
        wait_for((folder / "munge" / "socket").exists, f"munged, see {folder}/munge/log")
        _daemon(slurm, "slurmctld", "-D")
        for name in names:
            become = f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {name}"
            _daemon(slurm, "unshare", "--uts", "--mount", "--", "sh", "-c", become)
        try:
            wait_for(lambda: _idle(slurm) == NODES, "an idle node each", poll=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{slurm.logs()}") from None
        yield slurm


@contextmanager
def _keeper(slurm: Slurm) -> Iterator[None]:
    """In the end, or when this process has died, another one kills whatever belongs to this Slurm."""
    command = [sys.executable, "-m", "tests.slurm.loopback", "--keeper", str(slurm.folder)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT)
    try:
        yield
    finally:
        keeper.communicate(timeout=PATIENCE)


def _daemon(slurm: Slurm, *command: str) -> None:
    with (slurm.folder / "log" / "daemons").open("ab") as output:
        subprocess.Popen(command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.call("sinfo", "--noheader", "--partition=low", "--Node", "--format=%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


def _kill_all(slurm: Slurm) -> None:
    """Daemons, and what is left of jobs, wherever it was adopted."""

    def ended() -> bool:
        found = [process for process in psutil.process_iter() if _is_of(process, slurm)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return not found

    wait_for(ended, f"the end of all processes of {slurm.folder}", poll=0.2)


def _is_of(process: psutil.Process, slurm: Slurm) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get("SLURM_CONF") == slurm.environment["SLURM_CONF"]:
            return True
        # slurmstepd empties its environment, and writes to its slurmd's log
        step = process.name().startswith("slurmstepd")
        return step and any(file.path.startswith(f"{slurm.folder}/") for file in process.open_files())
    except psutil.Error:
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def main(command: list[str]) -> int:
    """The command's exit code; 2 where there can be no Slurm."""
    if command[:1] == ["--keeper"]:
        sys.stdin.read()  # ends when the parent process ends
        _kill_all(Slurm(Path(command[1])))
        return 0
    reason = missing()
    if reason is not None or not command:
        print(f"loopback: {reason or 'give a command'}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running(Path(folder)) as slurm:
        return subprocess.run(command, env=slurm.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
