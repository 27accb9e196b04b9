"""The doctor's confusion table over the bench's runs.

python benchmarks/doctor/judge.py                  # seeds kept back (odd)
python benchmarks/doctor/judge.py --split chosen   # seeds that thresholds were chosen on (even)
python benchmarks/doctor/judge.py --each           # and a line for each run that was judged wrongly
python benchmarks/doctor/judge.py --pack           # all runs' tables into one file, which is kept with the code
python benchmarks/doctor/judge.py --packed         # judge those, without a run

Each run is looked at as it was while it went: the rules see the table up to each step in turn. Intervals are Wilson's,
95%. Named: the injected fault is first or second among the findings at the run's end. Delay: steps from the fault's
onset to the first alarm.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from cases import EXPECTED, HEALTHY, WHOLE, Case, case_named, faulty, healthy
from scipy.stats import binomtest

from klimb.doctor.finding import Facts
from klimb.doctor.rules import examine
from klimb.doctor.table import Recorder
from klimb.readers.names import KLIMB

__all__ = ["case_named", "load"]
ROOT = Path("runs/doctor")
TABLES = Path(__file__).with_name("tables.parquet")
PATTERNS = ("quickstart*", "arithmetic*", "instructions", "compare-article*/*", "controller/*", "controller/fifth/*")
SHORTEST, LONGEST = 60, 100
SERIES = tuple(name for name in KLIMB if not name.startswith(("time/", "memory/")))
SPLITS = {"held-back": (1,), "chosen": (0,), "all": (0, 1)}


@dataclass(frozen=True, kw_only=True)
class Judged:
    case: Case
    steps: int
    codes: tuple[str, ...]
    alarms: tuple[str, ...]
    first_alarm: int | None

    @property
    def named(self) -> bool:
        return any(code in EXPECTED[self.case.name] for code in self.codes[:2])

    @property
    def delay(self) -> int | None:
        return None if self.first_alarm is None else max(0, self.first_alarm - self.case.onset)


def load(case: Case) -> tuple[list[dict[str, Any]], Facts] | None:
    """Rows and settings of a run that has ended."""
    folder = ROOT / case.run_name
    if not (folder / "end.txt").exists() or not (folder / "metrics.jsonl").exists():
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts = Facts.of(yaml.safe_load((folder / "config.yaml").read_text()))
    return [{key: float(value) for key, value in row.items()} for row in rows], facts


def load_all(packed: bool) -> Iterator[tuple[Case, list[dict[str, Any]], Facts]]:
    """Every run of the bench that is there: in runs/doctor, or in the file that `pack` wrote."""
    if packed:
        yield from unpack()
        return
    cases = [faulty(name, seed) for name in EXPECTED for seed in range(64)]
    cases += [healthy(name, seed) for name in HEALTHY for seed in range(64)]
    for case in cases:
        found = load(case)
        if found is not None:
            yield case, *found
    yield from whole_runs()


def whole_runs() -> Iterator[tuple[Case, list[dict[str, Any]], Facts]]:
    """The first hundred steps of the runs that recipes, `klimb compare` and benchmarks/controller left."""
    for pattern in PATTERNS:
        for place in sorted(ROOT.parent.glob(f"{pattern}/metrics.jsonl")):
            lines = place.read_text().splitlines()[: LONGEST + 1]
            if len(lines) < SHORTEST:
                continue
            rows = [{key: float(value) for key, value in json.loads(line).items()} for line in lines]
            config = place.with_name("config.yaml")
            facts = Facts.of(yaml.safe_load(config.read_text())) if config.exists() else Facts()
            yield case_named(f"{WHOLE}{place.parent.relative_to(ROOT.parent)}"), rows, facts


def pack() -> None:
    """The series that the rules read, of all runs, in one parquet file beside this one."""
    rows: list[dict[str, Any]] = []
    facts: dict[str, dict[str, Any]] = {}
    for case, of_run, known in load_all(packed=False):
        facts[case.run_name] = asdict(known)
        for row in of_run:
            rows.append({"run": case.run_name, "step": int(row["step"])} | {n: row[n] for n in SERIES if n in row})
    fields = [("run", pa.string()), ("step", pa.int32()), *((name, pa.float32()) for name in SERIES)]
    schema = pa.schema(fields, metadata={"facts": json.dumps(facts)})
    pq.write_table(pa.Table.from_pylist(rows, schema), TABLES, compression="zstd", compression_level=19)
    print(f"{len(facts)} runs, {TABLES.stat().st_size / 2**20:.2f} MiB: {TABLES}")


def unpack() -> Iterator[tuple[Case, list[dict[str, Any]], Facts]]:
    table = pq.read_table(TABLES)
    facts = json.loads(table.schema.metadata[b"facts"])
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row.pop("run"), []).append({k: v for k, v in row.items() if v is not None})
    for name, of_run in rows.items():
        yield case_named(name), of_run, Facts(**facts[name])


def judge(case: Case, rows: list[dict[str, Any]], facts: Facts) -> Judged:
    recorder, first_alarm, alarms = Recorder(bounded=True), None, set[str]()
    codes: tuple[str, ...] = ()
    for row in rows:
        recorder.add(row)
        if row["step"] == 0:
            continue
        findings = examine(recorder.table(), facts).findings
        codes = tuple(f.code for f in findings)
        now = {f.code for f in findings if f.severity == "alarm"}
        if now and first_alarm is None:
            first_alarm = int(row["step"])
        alarms |= now
    return Judged(case=case, steps=len(rows), codes=codes, alarms=tuple(sorted(alarms)), first_alarm=first_alarm)


def interval(hits: int, of: int) -> str:
    if of == 0:
        return "-"
    low, high = binomtest(hits, of).proportion_ci(method="wilson")
    return f"{hits}/{of} = {hits / of:.1%} ({low:.1%} to {high:.1%})"


def table(judged: list[Judged]) -> None:
    print("| injected | runs | first | second | not named | alarm | median delay, steps | otherwise first |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in EXPECTED:
        runs = [j for j in judged if j.case.name == name]
        if not runs:
            continue
        first = sum(bool(j.codes) and j.codes[0] in EXPECTED[name] for j in runs)
        named = sum(j.named for j in runs)
        delays = [j.delay for j in runs if j.delay is not None]
        others = Counter(
            j.codes[0] if j.codes else "nothing" for j in runs if not (j.codes[:1] and j.codes[0] in EXPECTED[name])
        )
        shown = ", ".join(f"{code} {count}" for code, count in others.most_common(3))
        delay = f"{median(delays):g}" if delays else "-"
        cells = (name, len(runs), first, named - first, len(runs) - named, len(delays), delay, shown)
        print(f"| {' | '.join(map(str, cells))} |")
    for name in HEALTHY:
        runs = [j for j in judged if j.case.name == f"healthy-{name}"]
        alarms = Counter(code for j in runs for code in j.alarms)
        shown = ", ".join(f"{code} {count}" for code, count in alarms.most_common(3))
        if runs:
            print(f"| healthy: {name} | {len(runs)} | | | | {sum(bool(j.alarms) for j in runs)} | | {shown} |")


def whole_line(judged: list[Judged]) -> None:
    runs = [j for j in judged if j.case.name.startswith(WHOLE)]
    if runs:
        print(f"| healthy: whole recipes | {len(runs)} | | | | {sum(bool(j.alarms) for j in runs)} | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, default="held-back")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--packed", action="store_true", help="judge the packed tables, not runs/doctor")
    parser.add_argument("--pack", action="store_true", help="write all tables into one file; judge nothing")
    args = parser.parse_args()
    if args.pack:
        pack()
        return
    judged = [judge(*found) for found in load_all(args.packed) if found[0].seed % 2 in SPLITS[args.split]]
    table(judged)
    whole_line(judged)
    faults = [j for j in judged if j.case.name in EXPECTED]
    sound = [j for j in judged if j.case.name not in EXPECTED]
    print()
    print(f"seeds: {args.split}; {len(faults)} faulty and {len(sound)} healthy runs")
    print(f"fault named first or second: {interval(sum(j.named for j in faults), len(faults))}")
    print(f"healthy runs with an alarm:  {interval(sum(bool(j.alarms) for j in sound), len(sound))}")
    delays = [j.delay for j in faults if j.delay is not None]
    print(
        f"median delay from onset to alarm: {median(delays) if delays else '-'} steps, of {len(delays)} with an alarm"
    )
    if args.each:
        for j in judged:
            if (j.case.name in EXPECTED and not j.named) or (j.case.name not in EXPECTED and j.alarms):
                codes = ", ".join(j.codes) or "nothing"
                print(f"{j.case.run_name} (strength {j.case.strength:.3g}): {codes}; alarms {j.alarms}")


if __name__ == "__main__":
    main()
