"""What a model is asked to write where guesses are measured: much of it a copy of the prompt, or nothing of it."""

from __future__ import annotations

ARTICLE = (
    "The harbour bridge was closed on Monday after engineers found a crack in one of its main cables. "
    '"We could not take the risk of leaving it open," said Maria Lindqvist, the head of the port authority. '
    "Ferries will carry passengers across the bay until the cable has been replaced. "
    '"The work will take six weeks if the weather stays calm," she told reporters at the site. '
    "Shop owners near the bridge fear for their business, and the mayor has promised them a lower tax this year."
)
CODE = '''def load_settings(path):
    """Read the settings file and return a dictionary."""
    with open(path) as file:
        lines = file.readlines()
    settings = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, value = line.split("=", 1)
        settings[name.strip()] = value.strip()
    return settings
'''
RECORDS = """[
  {"id": 1, "name": "Ann Miller", "city": "Boston", "email": "ann@example.com", "active": true},
  {"id": 2, "name": "Bob Stone", "city": "Denver", "email": "bob@example.com", "active": false},
  {"id": 3, "name": "Carl Young", "city": "Austin", "email": "carl@example.com", "active": true}
]"""
# (what the user says, how the answer begins): a model of 135M parameters copies once it has begun to.
COPYING = {
    "summary": (
        f"{ARTICLE}\n\nList the most important sentences of this article as quotes.",
        '1. "The harbour bridge was closed on Monday',
    ),
    "code": (
        f"Here is a file:\n\n```python\n{CODE}```\n\nPrint the same file with `path` renamed to `filename`.",
        '```python\ndef load_settings(filename):\n    """Read the settings file',
    ),
    "json": (
        f'Print this JSON again, with every "active" set to false.\n\n```json\n{RECORDS}\n```',
        '```json\n[\n  {"id": 1, "name": "Ann Miller",',
    ),
}
FREE = {
    "story": ("Write a story about an old lighthouse keeper who finds a letter in a bottle.", "The"),
    "physics": ("Explain why the sky is blue to a curious child.", "The"),
    "advice": ("What should somebody think about before moving to another country?", "When"),
}
