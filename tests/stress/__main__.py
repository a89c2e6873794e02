"""The command line: chooses scenarios, runs them one after the other, prints and writes."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
import warnings
from pathlib import Path

import torch

import storm
from storm import every_scenario
from storm.results import Result, read, text, write
from storm.trials import Asked, Scenario
from storm.trials import storm as run


def main() -> int:
    """Run what is asked for; 1 if anything was lost."""
    asked = _parser().parse_args()
    if asked.join:
        joined = [result for file in asked.join for result in read(file)]
        write(joined, "python -m storm", asked.out)
        print(text(joined))
        return 1 if any(each.lost for each in joined) else 0
    chosen = _chosen(asked)
    if asked.list or not chosen:
        print("\n".join(f"{each.kind:10} {each.name}" for each in every_scenario.scenarios()))
        return 0 if asked.list else 2
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trials = Asked(asked.seed, asked.count, asked.every, asked.number)
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else math.inf
    results: list[Result] = []
    for position, scenario in enumerate(chosen):
        now = time.monotonic()
        share = (end - now) / (len(chosen) - position)  # of the time that is left
        results.append(run(scenario, trials, now + share))
        done = results[-1]
        said = f"{scenario.kind} {scenario.name}: tried {done.tried}, lost {len(done.lost)}"
        print(f"{said}, {done.seconds:.0f} s", file=sys.stderr, flush=True)
    print(text(results))
    write(results, shlex.join(["python", "-m", "storm", *sys.argv[1:]]), asked.out)
    return 1 if any(each.lost for each in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m storm",
        description=storm.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = sorted({each.kind for each in every_scenario.scenarios()})
    parser.add_argument("--only", nargs="+", choices=kinds, help="kinds of scenario")
    parser.add_argument("--scenario", nargs="+", help="names, or beginnings of names")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, and of the order")
    parser.add_argument("--count", type=int, default=0, help="numbers for each scenario")
    parser.add_argument("--every", type=int, default=1, help="one number of so many")
    parser.add_argument("--number", type=int, help="this one alone")
    parser.add_argument("--minutes", type=float, help="stop then; each scenario has its share")
    parser.add_argument("--out", type=Path, default=Path("storm-output"), help="folder")
    parser.add_argument(
        "--join", nargs="+", type=Path, help="run nothing; make one page of these storm.json"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    return parser


def _chosen(asked: argparse.Namespace) -> list[Scenario]:
    return [
        each
        for each in every_scenario.scenarios()
        if (not asked.only or each.kind in asked.only)
        and (not asked.scenario or each.name.startswith(tuple(asked.scenario)))
    ]


if __name__ == "__main__":
    sys.exit(main())
