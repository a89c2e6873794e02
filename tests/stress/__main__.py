"""The command line: choose scenarios, run them one after the other, print a table."""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings

import torch

import stress
from stress import every_scenario
from stress.results import Result, table
from stress.trials import Asked, Scenario, run_scenario


def main() -> int:
    """Run the chosen scenarios; return 1 if a trial failed."""
    asked = _parser().parse_args()
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
        share = (end - now) / (len(chosen) - position)  # a share of the remaining time
        results.append(run_scenario(scenario, trials, now + share))
        done = results[-1]
        said = f"{scenario.kind} {scenario.name}: tried {done.tried}, failed {len(done.failures)}"
        print(f"{said}, {done.seconds:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    return 1 if any(each.failures for each in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stress",
        description=stress.__doc__,
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
