"""minivllm beside what a user would pick instead: the same seeded workloads, engines in turns, each in its own venv.

    make peers                      creates the virtual environments (minivllm runs in the project's own)
    python -m bench peers --quick   measures

`install` makes environments and model files, `workloads` the requests, `engines` runs one engine in a process,
`compare` lets them take turns and decides which ratios may be printed, `report` writes the table and the plot.
run_<engine>.py run in the environments of others: they import the standard library, `peer_runner` and their engine.
"""
