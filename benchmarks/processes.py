"""What the system tells about processes and the processor: memory, time stolen or idle."""

import os
from dataclasses import dataclass
from pathlib import Path


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_s(pid: int) -> float:
    """Processor time a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(pid: int) -> int:
    """Files and sockets a process has open; 0 if it is gone."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """What all cores together have done, in ticks since the start of the machine."""

    total: int
    idle: int
    stolen: int

    @classmethod
    def now(cls) -> "ProcessorUse":
        """As of now; all 0 where the system does not tell."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return cls(0, 0, 0)
        return cls(sum(fields), fields[3] + fields[4], fields[7])

    def stolen_pct(self, since: "ProcessorUse") -> float:
        """Share of the machine's time that other machines on the same host took."""
        return round(100 * (self.stolen - since.stolen) / max(1, self.total - since.total), 2)

    def busy_cores(self, since: "ProcessorUse", cores: int) -> float:
        """How many cores were busy on average, whoever used them."""
        total = max(1, self.total - since.total)
        return round(cores * (total - (self.idle - since.idle)) / total, 2)
