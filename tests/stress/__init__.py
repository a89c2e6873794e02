"""Stress tests: interrupts, crashes, forks, full disks, long runs and random programs.

`python -m stress`, run from the `tests` folder, runs every scenario many times and prints a table
of trials and failures; `python -m stress --list` lists the scenarios.

    programs    random programs in regions of sac-policies, some changed between forward
                and backward
    interrupts  Ctrl-C at every place of forward, backward, step, save and load of all four parts
    saves       killed ranks, full disks and readers at random moments of saves on two ranks
    forks       processes forked and spawned around a model that is offloaded to a folder
    soak        3,000 steps with all parts at once: memory, handles and threads

A trial fails if it ends in wrong gradients, a mixed or missing checkpoint, an error without advice,
a changed process, or a hang. Each failure is printed with a command that repeats it, and the exit
code is 1.

Needs the packages, torch, and a system with `fork`.
"""
