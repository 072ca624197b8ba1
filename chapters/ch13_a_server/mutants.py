"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "waits for each answer before the next request": (
        "tasks.append(asyncio.create_task(one(i, start + seconds)))",
        "tasks.append(asyncio.create_task(one(i, start + seconds)))\n        await tasks[-1]",
    ),
    "counts from when it sent": ("return Answer(now() - due,", "return Answer(now() - due - late,"),
    "does not say how late it was": ("late, failed = now() - due, False", "late, failed = 0.0, False"),
    "sleeps a whole time between two": ("start + seconds - now()", "seconds"),
    "sends all at once": ("max(0.0, start + seconds - now())", "0.0"),
    "lets a failure take the others along": ("except Exception:", "except ZeroDivisionError:"),
    "hides failures": ("failed = True", "failed = False"),
}
