"""One measurement in a process of its own: `python -m wholebatch.bench._worker JOB`, which prints JSON.

A job is a mapping, as JSON: what to do ("check", "time" or "peak"), with what, and for whom.
"""

import importlib
import json
import sys
from typing import Any

from ._case import UNSPLIT
from ._peak import grown
from ._turns import differences, take_turns


def work(job: dict[str, Any]) -> Any:
    """Do a job.

    Args:
        job: `{"do", "front_end", "problem", "options", "size", "threads", "names", "rounds", "repeats"}`.
    """
    module = importlib.import_module(f"._{job['front_end']}", __package__)
    checking = job["do"] == "check"
    bench = module.Bench(job["problem"], job["options"], job["size"], job["threads"], double=checking)
    names = job["names"]
    if checking:
        return differences(bench, names, UNSPLIT)
    if job["do"] == "peak":
        return grown(bench, *names)
    before = bench.limits()
    contenders = take_turns(bench, names, job["rounds"], job["repeats"])
    limits = {name: max(rate, before[name]) for name, rate in bench.limits().items()}
    return {"rows": bench.rows, "work": bench.work(), "limits": limits, "contenders": contenders}


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
