"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "lets a prompt exceed the budget": (
        "        running.append(request)\n        new_tokens = min(len(request.tokens) - request.num_computed, budget)",
        "        running.append(request)\n        new_tokens = len(request.tokens) - request.num_computed",
    ),
    "forgets what is computed": (
        "    for request in running:\n        new_tokens = min(len(request.tokens) - request.num_computed, budget)",
        "    for request in running:\n        new_tokens = min(len(request.tokens), budget)",
    ),
    "admits without limit": ("while waiting and budget and len(running) < max_running", "while waiting and budget"),
    "serves the last who came": ("waiting.pop(0)", "waiting.pop()"),
    "never cuts a prompt": (
        "        request = waiting.pop(0)\n",
        "        if len(waiting[0].tokens) > budget:\n            break\n        request = waiting.pop(0)\n",
    ),
    "plans for nothing": ("        if new_tokens:\n", "        if True:\n"),
    "is V0: nobody decodes while a prompt is computed": (
        "    for request in running:\n",
        "    for request in [] if waiting else running:\n",
    ),
}
