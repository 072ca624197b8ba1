"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "tells the last step for the first": ("first_step=story.first_step", 'first_step=step["step"]'),
    "counts steps for tokens": ("story.num_computed + now", "story.num_computed + 1"),
    "keeps the last tokens alone": ('story.output + step["tokens"].get(name, [])', 'step["tokens"].get(name, [])'),
    "puts new tokens first": (
        'story.output + step["tokens"].get(name, [])',
        'step["tokens"].get(name, []) + story.output',
    ),
    "believes that every request that runs gets a token": ('step["tokens"].get(name, [])', 'step["tokens"][name]'),
    "tells what stopped it for the reason": ("reason, _ = step", "_, reason = step"),
    "counts a row as the step that it is in": ('Story(step["step"], 0', "Story(len(found), 0"),
}
