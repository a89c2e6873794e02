"""Storm: what is hard on torchparts, many times over; nothing may be lost.

`python -m storm` runs five kinds of scenario and prints a table of what was tried, survived and
lost, with the seconds it took; `python -m storm --list` names the scenarios.

    programs    random programs under every engine of sac-policies, some changed between forward
                and backward
    interrupts  Ctrl-C at every place of forward, backward, step, save and load of all four parts
    saves       killed ranks, full disks and readers at random moments of saves on two ranks
    forks       processes forked and spawned around a model that is offloaded to a folder
    soak        3,000 steps with all parts at once: memory, handles and threads

Lost is what ends in wrong gradients, a mixed or missing checkpoint, an error that nobody can act
on, something left behind, or no end at all. Each loss is printed with the command that repeats
it, and the exit code is 1.

Not part of the distributions; needs them, torch, and a system with `fork`.
"""
