"""What the model is asked to write in chapter 15."""

from __future__ import annotations

RECORDS = """[
  {"id": 1, "name": "Ann Miller", "city": "Boston", "email": "ann@example.com", "active": true},
  {"id": 2, "name": "Bob Stone", "city": "Denver", "email": "bob@example.com", "active": false},
  {"id": 3, "name": "Carl Young", "city": "Austin", "email": "carl@example.com", "active": true}
]"""
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
ARTICLE = (
    "The harbour bridge was closed on Monday after engineers found a crack in one of its main cables. "
    '"We could not take the risk of leaving it open," said Maria Lindqvist, the head of the port authority. '
    "Ferries will carry passengers across the bay until the cable has been replaced. "
    '"The work will take six weeks if the weather stays calm," she told reporters at the site. '
    "Shop owners near the bridge fear for their business, and the mayor has promised them a lower tax this year."
)
Messages = list[dict[str, str]]


def conversation(said: str, begun: str) -> Messages:
    """What the user says, and how the answer begins: so small a model copies once it has begun to."""
    return [{"role": "user", "content": said}, {"role": "assistant", "content": begun}]


TEXTS = {
    "records": conversation(
        f'Print this JSON again, with every "active" set to false.\n\n```json\n{RECORDS}\n```',
        '```json\n[\n  {"id": 1, "name": "Ann Miller",',
    ),
    "quotation": conversation(
        f"{ARTICLE}\n\nList the most important sentences of this article as quotes.",
        '1. "The harbour bridge was closed on Monday',
    ),
    "code": conversation(
        f"Here is a file:\n\n```python\n{CODE}```\n\nPrint the same file with `path` renamed to `filename`.",
        '```python\ndef load_settings(filename):\n    """Read the settings file',
    ),
    "story": conversation("Write a story about an old lighthouse keeper who finds a letter in a bottle.", "The"),
}
