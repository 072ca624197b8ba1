"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "takes the first who came": ("running.pop()", "running.pop(0)"),
    "sends the victim to the end of the queue": ("waiting.insert(0, victim)", "waiting.append(victim)"),
    "believes that lost memory is computed": (
        "victim.blocks, victim.num_computed = [], 0",
        "victim.blocks = []",
    ),
    "keeps the blocks that it gave back": ("victim.blocks, victim.num_computed = [], 0", "victim.num_computed = 0"),
    "preempts somebody in any case": (
        "    while num_missing > len(free):\n",
        "    while num_missing >= len(free):\n",
    ),
    "goes on with a request that is gone": ("            return False\n", "            break\n"),
}
