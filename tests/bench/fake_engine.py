"""An engine that answers cases as `bench.peer_driver` does: `fake_engine.py JOURNAL NAME MS [FAILS [ENDS]]`.

Writes each question to the journal. Cases whose context is FAILS are answered by an error; at one whose
context is ENDS it ends.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    journal, name, ms, *more = sys.argv[1:]
    fails, ends = (int(more[place]) if len(more) > place else -1 for place in (0, 1))
    _say({"ready": f"{name} 1.0"})
    for line in sys.stdin:
        case = json.loads(line)
        with Path(journal).open("a") as file:
            file.write(f"{name} {case['what']} {case.get('context')}\n")
        context = case.get("context")
        if context == ends:
            sys.exit(3)
        answer = {
            "read": {"bytes_per_s": 1e9},
            "floor": {"bytes": 2_000_000},
        }.get(case["what"], {"ms": [float(ms)] * case.get("repeats", 1)})
        _say({"error": "too long"} if context == fails else answer)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
