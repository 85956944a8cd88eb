"""Long runs: trainings under random faults, and growth of memory, files and threads over many steps.

    cd tests && python -m soak [--minutes 30] [--seed N]

`faults` draws what happens, `training` is what every rank runs, `supervisor` starts ranks and harms them, `rounds`
compares the result with a training without faults, and `growth` counts what a process holds.
"""
