"""Put what ``specialised_gpu.py`` measured into the table of its device.

    python benchmarks/specialised_table.py FOLDER/specialised.json [more.json ...]

An entry names warp-specialised kernels where they take less than 0.99 of the time of those of Triton in the same run; of several runs
the mean counts, of a configuration that was in half of them at least. Times are scaled to the entry's own. A device without a table gets
one "from" that of the H200.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from gpu_table import TABLES, problem_of  # noqa: E402

from moefuse.kernels.triton.config import HOPPER, table_entries  # noqa: E402

ENOUGH = 0.99


def best(points: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """(time by time of Triton's kernels, configuration) of the one that is the quickest on average over the measurements."""
    ratios: dict[str, list[float]] = {}
    for point in points:
        for name, us in point["us"].items():
            if name != "triton":
                ratios.setdefault(json.dumps(point["configs"][name]), []).append(us / point["us"]["triton"])
    most = max(map(len, ratios.values()))
    mean = {config: sum(found) / len(found) for config, found in ratios.items() if 2 * len(found) >= most}
    config = min(mean, key=mean.__getitem__)
    return mean[config], json.loads(config)


def main() -> None:
    runs = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    (device,) = {run["gpu"] for run in runs}
    path = TABLES / f"{device.replace(' ', '_').replace('/', '_')}.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"gpu": device, "from": HOPPER, "entries": []}
    for name in sorted({name for run in runs for name in run["points"]}):
        shape, tokens = name.split("/")
        problem = asdict(problem_of(shape, int(tokens)))
        del problem["separate"]
        ratio, config = best([run["points"][name] for run in runs if name in run["points"]])
        entry = next((e for e in data["entries"] if e["problem"] == problem), None)
        if entry is None:
            known = next(e for e in table_entries(HOPPER) if e["problem"] == problem)
            entry = {"problem": problem, "config": known["config"]}
            data["entries"].append(entry)
        entry.pop("specialised", None)
        if ratio < ENOUGH:
            entry["specialised"] = {"us": round(entry["us"] * ratio, 2), "config": config} if "us" in entry else {"config": config}
        print(f"{name:16} {ratio:.3f}")
    head = json.dumps({k: v for k, v in data.items() if k != "entries"})[1:-1]
    lines = ",\n  ".join(json.dumps(entry) for entry in data["entries"])
    path.write_text("{" + head + ',\n "entries": [\n  ' + lines + "\n ]}\n")


if __name__ == "__main__":
    main()
