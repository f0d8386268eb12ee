"""Child of test_tuning: a process that reports what its tuners chose, as an engine's would, without torch and Triton.

``SAYS`` is JSON: ``choices`` by kernel, ``print``, and fields of the report that are not as they should be. A kernel
that is let go or replaced chooses what ``freed`` says.
"""

import json
import os
import sys
from pathlib import Path

import msgspec

from samestate.evidence import controls
from samestate.evidence.records import KernelSelection, KernelsSelected
from samestate.evidence.tuner_profile import read
from samestate.evidence.tuner_report import TunerReport, report_name

says = json.loads(os.environ["SAYS"])
freed = os.environ.get(controls.RELEASE_VARIABLE) or os.environ.get(controls.OTHER_VARIABLE)
profile = os.environ.get(controls.PROFILE_VARIABLE)
choices = says.get("choices", {"k.shown": 16, "k.hidden": 16})
if freed in says.get("freed", {}):
    choices[freed] = says["freed"][freed]
selected = KernelsSelected(
    rank=0,
    mode="record" if profile is None else "release" if freed else "pin",
    profile_sha256=read(Path(profile))[1] if profile else None,
    benchmarks=0,
    selections=[
        KernelSelection(kernel=kernel, key=says.get("key", ["64"]), config={"BLOCK": block})
        for kernel, block in sorted(choices.items())
    ],
    violations=[],
)
selected = msgspec.structs.replace(selected, **says.get("report", {}))
report = TunerReport(begun_ns=1, device="cpu", versions={}, selected=selected)
(Path(os.environ[controls.RECORD_VARIABLE]) / report_name(os.getpid())).write_bytes(msgspec.json.encode(report))
said = says.get("print", "{k.shown}").replace("{k.shown}", str(choices.get("k.shown")))
if "count" in says:
    count = Path(says["count"])
    count.write_text(f"{int(count.read_text() or 0) + 1 if count.exists() else 1}")
    said += f" {count.read_text()}" if int(count.read_text()) >= says["drifts"] else ""
if "into" in says and not (freed and says.get("lazy")):
    Path(says["into"]).write_text(said)
sys.stdout.write(said)
